"""Faults at random moments of the real saving and loading code, in separate processes: the checkpoint that `latest`
names is complete, and nothing that was reported as saved is lost. The same through the real launcher:
test_launcher_faults.py.
"""

from __future__ import annotations

import os
import random
import select
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.damage import damage
from support.small_disk import small_disk
from test_checkpoint import STATE

from errors import UserError
from models.storage.steps import list_checkpoints, step_of
from training.checkpoint.resume import find_damage, find_resume
from training.checkpoint.retention import Retention
from training.checkpoint.run_folder import RunFolder
from training.checkpoint.state import read_state, remove_leftovers
from training.checkpoint.writer import CheckpointWriter, ShareFile

TIMES = 25
LONGEST = 0.3  # s from the first save of a process to its end; several saves
VALUES = 20_000  # in a tensor


def files_of(rank: int) -> tuple[str, ...]:
    return (
        f"layer_{2 * rank:02d}-model_states.pt",
        f"layer_{2 * rank + 1:02d}-model_states.pt",
        f"optimizer-stage_{rank:02d}-dp_00.safetensors",
    )


def fork(work: Callable[[], None]) -> int:
    """Run the work in a forked process, which exits with 0 when it is done."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        torch.set_num_threads(1)  # a forked process has lost the threads that the test's own has started
        work()
        code = 0
    finally:
        os._exit(code)


@contextmanager
def saving(checkpoints: Path, rank: int = 0, world_size: int = 1) -> Iterator[Callable[[int], None]]:
    """save(step): every tensor of the checkpoint holds the step's number. In a process of its own."""
    from unittest.mock import patch

    import torch.distributed as dist

    store = dist.FileStore(f"{checkpoints}.store", world_size) if world_size > 1 else dist.HashStore()
    dist.init_process_group("gloo", rank=rank, world_size=world_size, store=store)
    state = torch.zeros(VALUES)
    with patch(
        "training.checkpoint.writer.plan_whole_share",
        lambda *_: [ShareFile(name, {"x@0": state}) for name in files_of(rank)],
    ):
        writer = CheckpointWriter(object(), checkpoints, Retention(keep_last=2), asynchronous=True)
        if rank == 0:
            remove_leftovers(checkpoints)
        dist.barrier()

        def save(step: int) -> None:
            state.fill_(step)  # while the one before is still being written
            writer.save(replace(STATE, step=step))

        yield save
        writer.wait()


def save_until_ended(checkpoints: Path, first: int, reported: int, rank: int, world_size: int, listens: bool) -> None:
    """Save one step after the other, and write each saved step to the pipe `reported`. listens: handle signals, as a
    run does."""
    from training.distributed.interrupts import Interrupts

    requests = None
    with saving(checkpoints, rank, world_size) as save:
        if listens:
            requests = Interrupts(checkpoints.parent, 60, None, is_main=False).start()
        for step in range(first, first + 10_000):
            save(step)
            if step > first and rank == 0:  # this save has waited for the one before
                os.write(reported, (step - 1).to_bytes(4, "little"))
            if requests is not None and requests.agree().ends:
                break
    if rank == 0:
        os.write(reported, step.to_bytes(4, "little"))  # the last one is saved too
    if requests is not None:
        requests.close()


def check_whole(checkpoints: Path, at_least: int) -> int:
    """Return the newest step, after checks: everything that looks like a checkpoint is one, and the newest is not older
    than the last one reported as saved."""
    resumable = find_resume("latest", checkpoints, trust=False)
    newest = resumable.candidates[0]
    assert resumable.damages == [] and (step := read_state(newest).step) >= at_least
    for step_dir in list_checkpoints(checkpoints):
        assert find_damage(step_dir, 0, 1) is None
        for file in step_dir.glob("layer_*"):
            assert torch.load(file, weights_only=True)["x@0"].unique().tolist() == [step_of(step_dir)]
    return step


@pytest.mark.full
@pytest.mark.parametrize("fault, world_size", [("kill one", 1), ("kill one", 2), ("kill all", 2), ("terminate", 2)])
def test_a_signal_at_any_moment_loses_nothing(tmp_path: Path, fault: str, world_size: int) -> None:
    rng, first, interrupted, checkpoints = random.Random(0), 1, 0, tmp_path / "checkpoints"
    for _ in range(TIMES):
        Path(f"{checkpoints}.store").unlink(missing_ok=True)
        reader, reported = os.pipe()
        pids = [
            fork(
                lambda rank=rank: save_until_ended(checkpoints, first, reported, rank, world_size, fault == "terminate")
            )
            for rank in range(world_size)
        ]
        os.close(reported)
        assert select.select([reader], [], [], 60)[0], "nothing was saved in a minute"
        time.sleep(rng.random() * LONGEST)
        if fault == "terminate":
            for pid in pids:  # one after the other, as launchers do
                os.kill(pid, signal.SIGTERM)
                time.sleep(rng.random() * 0.05)
            codes = {os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids}
            assert codes <= {0, -signal.SIGTERM}  # one that was notified late may have finished
        else:
            chosen = rng.choice(pids)
            for pid in [chosen] if fault == "kill one" else pids:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.1 if fault == "kill one" and world_size > 1 else 0)  # the other one continues, and finds out
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        with open(reader, "rb") as pipe:
            last_told = int.from_bytes(pipe.read()[-4:], "little")
        interrupted += any(checkpoints.glob("tmp-*"))
        assert last_told >= first
        first = check_whole(checkpoints, last_told) + 1
    assert fault == "terminate" or interrupted > TIMES // 4  # signals did hit saves


def fill_up_and_save(checkpoints: Path, first: int, seeds: range) -> None:
    """Saves; each time something takes most of the disk between the check for room and the end of the save."""
    from unittest.mock import patch

    import torch.distributed as dist

    from models.storage import folders

    filler, refused = checkpoints.parent / "filler", 0
    with saving(checkpoints) as save:
        save(first)
    dist.destroy_process_group()
    for step in seeds:
        rng = random.Random(step)

        def check_and_fill(output_dir: Path, needed: int) -> None:
            folders.check_disk_space(output_dir, needed)
            room = int(rng.random() * needed * 0.025)  # the check counts 16 MB for what is small
            with open(filler, "wb") as stream:
                os.posix_fallocate(stream.fileno(), 0, shutil.disk_usage(checkpoints).free - room)

        with (
            patch("training.checkpoint.writer.check_disk_space", check_and_fill),
            patch("training.distributed.ranks.time.sleep"),
        ):
            try:
                with saving(checkpoints) as save:
                    save(step)
            except UserError as error:
                assert "cannot be written" in str(
                    error
                ) and "the checkpoints before it are untouched. Make room" in str(error), error
                refused += 1
        dist.destroy_process_group()
        filler.unlink()
        newest = check_whole(checkpoints, first)
        assert newest in (first, step)
        first = newest
    assert len(seeds) > refused > len(seeds) // 4


@pytest.mark.full
def test_a_disk_that_fills_up_at_any_moment_loses_nothing(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 24 * 2**20) as disk:
        pid = fork(lambda: fill_up_and_save(disk / "checkpoints", 1, range(2, 2 + TIMES)))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.parametrize("kind", ["truncated", "flipped"])
def test_damage_anywhere_is_found(tmp_path: Path, kind: str) -> None:
    checkpoints = tmp_path / "checkpoints"

    def save_two() -> None:
        with saving(checkpoints) as save:
            save(1)
            save(2)

    assert os.waitstatus_to_exitcode(os.waitpid(fork(save_two), 0)[1]) == 0
    rng, names = random.Random(1), sorted(file.name for file in (checkpoints / "global_step2").iterdir())
    for time_ in range(max(TIMES, 5 * len(names))):
        broken = Path(shutil.copytree(checkpoints, tmp_path / "broken"))
        name = names[time_ % len(names)]
        damage(broken / "global_step2" / name, kind, rng)
        resumable = find_resume("latest", broken, trust=False)
        found = [step_of(candidate) for candidate in resumable.candidates if find_damage(candidate, 0, 1) is None]
        assert found == [1], name
        shutil.rmtree(broken)


@pytest.mark.parametrize("count", [pytest.param(TIMES, marks=pytest.mark.full), 3])
def test_of_runs_that_start_at_once_one_gets_the_folder(tmp_path: Path, count: int) -> None:
    for attempt in range(count):
        out, (ready, go) = tmp_path / str(attempt), os.pipe()

        def take() -> None:
            os.close(go)
            os.read(ready, 1)  # all at once: the pipe's end closes
            folder = RunFolder(out)
            try:
                folder.acquire_lock()
            except UserError as error:
                assert "is in use by another run" in str(error)
                raise
            time.sleep(0.2)

        pids = [fork(take) for _ in range(4)]
        os.close(ready)
        os.close(go)
        assert sorted(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids) == [0, 1, 1, 1]
