"""A rank that is dead, stopped or stuck is named by another one, and the run ends: real processes, real signals."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from support.workers import WorkerGroup

import console
from models.parallel.exchanges import wait_for
from training.distributed.leaving import saving
from training.distributed.ranks import Ranks
from training.distributed.watchdog import Watchdog, find_place

ROOT = Path(__file__).resolve().parents[3]
STUCK_MINUTES = 0.05


class Stage(torch.nn.Module):
    def forward(self) -> None:
        pass


def work(words: dict[int, str], folder: Path, stuck_minutes: float, grace_seconds: float) -> None:
    """On a rank: passes through its stage and meets the others after each, until its word comes true."""
    import sys

    import torch.distributed as dist

    rank, stage = dist.get_rank(), Stage()
    sys.__stderr__ = open(folder / f"rank_{rank}", "w", buffering=1)
    word = words.get(rank, "")
    ranks = Ranks(rank, dist.get_world_size(), rank, dist.get_world_size())
    try:
        with Watchdog(ranks, stuck_minutes, grace_seconds=grace_seconds, logs=folder) as watchdog:
            if word == "load forever":
                time.sleep(60)
            with watchdog.following(stage):
                pass_and_meet(stage, word, folder)
    except (ValueError, RuntimeError):  # as a process of its own would
        os._exit(1)


def flush_slowly(file: Path) -> None:
    """As a save's thread does on a disk that is slower than `stuck_minutes`, while the main thread waits for it."""
    from unittest.mock import patch

    import filesystem

    with patch.object(filesystem.os, "fsync", lambda descriptor: time.sleep(1.5 * 60 * STUCK_MINUTES)):
        thread = threading.Thread(target=filesystem.write_atomically, args=(file, "content"))
        thread.start()
        thread.join()


def save(folder: Path) -> None:
    with saving():
        for _ in range(5):
            time.sleep(0.5)
            console.report_progress()  # bytes were written
        (folder / "saved").touch()


def pass_and_meet(stage: Stage, word: str, folder: Path) -> None:
    import torch.distributed as dist

    for step in range(6):
        stage()
        dist.barrier()
        if step == 4 and word == "sleep":
            time.sleep(60)
        if step == 4 and word == "save and sleep":
            threading.Thread(target=save, args=(folder,), daemon=True).start()
            time.sleep(60)
        if step == 4 and word == "take its time":
            with console.progress("loading", 20) as bar:
                for _ in bar.follow(range(20)):
                    time.sleep(0.1 * 60 * STUCK_MINUTES)
        if step == 4 and word == "flush slowly":
            flush_slowly(folder / "file")
        if step == 4 and word == "leave":
            raise ValueError("reported elsewhere")
        if step == 4 and word.startswith("SIG"):
            os.kill(os.getpid(), signal.Signals[word])


def run(
    folder: Path,
    world_size: int,
    words: dict[int, str],
    stuck_minutes: float = STUCK_MINUTES,
    grace_seconds: float = 20,
) -> tuple[list[str], float]:
    """The messages, by rank, and the seconds it took."""
    group = WorkerGroup(world_size, folder)
    group.run(time.sleep, 0)  # started
    processes, start = list(group._processes), time.monotonic()
    group.send(work, words, folder, stuck_minutes, grace_seconds)
    for rank in range(world_size):
        if words.get(rank) != "SIGSTOP":
            with suppress(EOFError):
                group._pipes[rank].poll(60) and group._pipes[rank].recv()
    seconds = time.monotonic() - start
    for process in processes:
        process.kill()
    group.close()
    return [(folder / f"rank_{rank}").read_text().strip() for rank in range(world_size)], seconds


STOPPED = (
    "error: rank {rank} has not answered for stuck_minutes=0.05: it is stopped or stuck, or its host is gone; "
    "continue with resume=auto"
)
KILLED = (
    "error: rank {rank} has ended without a message: it was killed, or its host ran out of memory; "
    "continue with resume=auto"
)
ASLEEP = (
    "error: rank {rank} has made no progress for stuck_minutes=0.05: it is at "
    "tests/training/distributed/test_watchdog.py:LINE (pass_and_meet); the other ranks wait for it: {others} in "
    "gloo:barrier number {number} of the group default_pg of {all}, which rank {rank} has not begun; continue with"
)
SLOW_DISK = (
    "warning: rank {rank} has waited for the disk for stuck_minutes=0.05: 7 bytes of {folder}/.file.tmp are being "
    "flushed"
)
BEFORE_ITS_PASSES = ASLEEP.replace("(pass_and_meet)", "(work)")
CASES = {
    "SIGSTOP": STOPPED, "SIGKILL": KILLED, "sleep": ASLEEP, "load forever": BEFORE_ITS_PASSES, "leave": "",
    "take its time": "", "flush slowly": SLOW_DISK,
}  # fmt: skip
FAST = [("SIGSTOP", 2, 1), ("load forever", 2, 1), ("flush slowly", 2, 1)]
REST = [
    (word, world_size, rank)
    for word in CASES
    for world_size, rank in ((2, 0), (2, 1), (3, 0), (3, 2))
    if (word, world_size, rank) not in FAST
]


@pytest.mark.parametrize(
    "word, world_size, rank", [*FAST, *(pytest.param(*case, marks=pytest.mark.full) for case in REST)]
)
def test_the_rank_is_named_once(tmp_path: Path, word: str, world_size: int, rank: int) -> None:
    messages, seconds = run(tmp_path, world_size, {rank: word})
    others, number = [str(other) for other in range(world_size) if other != rank], 2 if word == "load forever" else 7
    waiting = f"rank {others[0]} waits" if world_size == 2 else f"ranks {', '.join(others)} wait"
    everyone = f"ranks {', '.join(map(str, range(world_size)))}"
    expected = CASES[word].format(rank=rank, folder=tmp_path, others=waiting, number=number, all=everyone)
    (found,) = [text for text in messages if text] or [""]
    found = re.sub(r"test_watchdog.py:\d+", "test_watchdog.py:LINE", found)
    assert found.startswith(expected) and bool(found) == bool(expected)
    assert seconds < 60
    if word in ("sleep", "load forever"):
        for each in range(world_size):  # all threads' stacks, and what was recorded
            assert "test_watchdog.py" in (tmp_path / f"world{world_size}_rank{each}.log").read_text()
            recorded = json.loads((tmp_path / f"flight_recorder_{each}.json").read_text())["gloo"]["entries"]
            assert recorded[-1]["profiling_name"] == "gloo:barrier" and recorded[-1]["retired"] == (each == rank)


@pytest.mark.parametrize(
    "ending, message", [("leave", ""), pytest.param("SIGKILL", KILLED.format(rank=1), marks=pytest.mark.full)]
)
def test_the_others_end_too_where_nothing_else_ends_them_and_a_save_ends_first(
    tmp_path: Path, ending: str, message: str
) -> None:
    messages, seconds = run(tmp_path, 2, {0: "save and sleep", 1: ending}, stuck_minutes=5, grace_seconds=0.5)
    assert messages[0] == message and seconds < 40 and (tmp_path / "saved").exists()


def test_the_place_is_the_nearest_line_of_the_project() -> None:
    import json

    seen: list[tuple[str, bool]] = []
    json.loads(
        "[1]", parse_int=lambda _: seen.append(find_place(sys._getframe(1)))
    )  # as a library below would be caught
    assert seen[0][0].startswith("tests/training/distributed/test_watchdog.py:") and not seen[0][1]


def test_on_a_gpu_any_line_may_wait_for_it_but_those_that_read_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_backend", lambda: "nccl")
    for file, waits in {"data/loading/loader.py": False, "models/losses/cross_entropy.py": True}.items():
        seen: list[tuple[str, bool]] = []
        exec(
            compile("seen.append(find_place(sys._getframe()))", str(ROOT / file), "exec"),
            {"seen": seen, "find_place": find_place, "sys": sys},
        )
        assert seen == [(f"{file}:1 (<module>)", waits)]


def test_a_rank_that_waits_for_a_transfer_waits_for_another_rank() -> None:
    class Work:
        def wait(self) -> None:
            seen.append(find_place(sys._getframe(1)))

    seen: list[tuple[str, bool]] = []
    wait_for([Work()])
    assert seen[0][0].startswith("models/parallel/exchanges.py:") and seen[0][1]


def keep_a_group_waiting(folder: Path) -> list[str]:
    """On a rank: how a wait beyond the limit of collectives ends, in the writer's group and the default one."""
    from typing import Any
    from unittest.mock import patch

    import torch.distributed as dist

    from training.checkpoint.writer import CheckpointWriter
    from training.distributed import watchdog

    rank = dist.get_rank()
    engine: Any = None  # nothing is saved
    with patch.object(watchdog, "_SECONDS_TO_ANSWER", 0.2):
        watch = watchdog.Watchdog(Ranks(rank, 2, rank, 2), 0.01)
        writer = CheckpointWriter(engine, folder)
        watch.limit_collectives()  # to 1.8 seconds
    outcomes = []
    for group in (writer._group, None):  # the default group last: it is lost
        if rank == 1:
            time.sleep(3)
        try:
            dist.all_reduce(torch.ones(1), group=group)
            outcomes.append("met")
        except RuntimeError as error:
            outcomes.append("timed out" if "Timed out" in str(error) else "lost")
    return outcomes


def test_the_limit_of_collectives_leaves_the_time_for_a_slow_save(workers, tmp_path: Path) -> None:
    waited, _ = workers(2).run(keep_a_group_waiting, tmp_path)
    assert waited == ["met", "timed out"]


def listen_for_a_while() -> tuple[int, int]:
    """On a rank: how many listeners to progress there are after some heartbeats of a watchdog, and after its end."""
    import torch.distributed as dist

    rank = dist.get_rank()
    with Watchdog(Ranks(rank, 2, rank, 2), stuck_minutes=1):
        time.sleep(2.5)
        watching = len(console._listeners)
    return watching, len(console._listeners)


def test_a_watchdog_listens_to_progress_until_its_end(workers) -> None:
    assert workers(2).run(listen_for_a_while) == [(1, 0), (1, 0)]


def export_slowly(folder: Path) -> list[str]:
    """On a rank: a save whose export takes longer than collectives of the default group may."""
    from typing import Any
    from unittest.mock import patch

    from training.checkpoint import writer
    from training.checkpoint.state import TrainerState
    from training.distributed.process import limit_collectives

    engine: Any = None  # its files are none
    with patch.object(writer, "plan_whole_share", lambda *_: []):
        saves = writer.CheckpointWriter(engine, folder, export=lambda step: time.sleep(3))
        limit_collectives(timedelta(seconds=1))
        zeros = dict.fromkeys(("num_tokens", "global_batch_size", "micro_batch_size", "num_samples", "seed"), 0)
        saves.save(TrainerState(step=1, num_stages=1, dp_size=2, total_steps=1, **zeros))
    return sorted(path.name for path in folder.iterdir())


def test_the_ranks_wait_for_an_export_as_long_as_for_a_save(workers, tmp_path: Path) -> None:
    assert workers(2).run(export_slowly, tmp_path) == [["global_step1", "latest"]] * 2
