"""Signals, the files STOP and SAVE, and the clock: whichever rank is notified, all ranks act at the same step."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.cases import Case, train_run
from support.launching import run_code
from support.tiny import save_llama, save_records, save_tokenizer
from support.workers import WorkerGroup

from training.checkpoint.state import TrainerState
from training.distributed.interrupts import discard_requests

ROOT = Path(__file__).resolve().parents[3]
NEVER = 100_000  # steps
EVERY = ("logging_steps=1", "optimizer=adamw")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("requests")
    save_llama(root / "hf", num_hidden_layers=2)
    save_tokenizer(root / "hf")
    save_records(root / "train.jsonl", 24)
    return root


@pytest.fixture
def run(workers: Callable[[int], WorkerGroup], root: Path, tmp_path: Path) -> Callable[..., Path]:
    """run(asked, *overrides): a run of two stages during which `asked` happens on some rank; returns its output_dir."""

    def start(asked: dict[int, str], *overrides: str, steps: int = NEVER) -> Path:
        out = tmp_path / "out"
        case = Case(
            root / "hf",
            root / "train.jsonl",
            root,
            2,
            2,
            steps,
            (f"output_dir={out}", *EVERY, *overrides),
        )
        workers(2).run(train_while_asked, case, asked)
        return out

    return start


def train_while_asked(case: Case, asked: dict[int, str]) -> None:
    """On a rank: a run, and a thread that requests something after the second step."""
    out = Path(case.config().output_dir)

    def ask(what: str) -> None:
        metrics = out / "metrics.jsonl"
        while not metrics.exists() or len(metrics.read_text().splitlines()) < 2:
            time.sleep(0.01)
        if what in ("STOP", "SAVE"):
            (out / what).touch()
        else:
            os.kill(os.getpid(), signal.Signals[what])

    if (what := asked.get(int(os.environ["RANK"]))) is not None:
        threading.Thread(target=ask, args=(what,), daemon=True).start()
    before = signal.getsignal(signal.SIGINT)
    train_run(case)
    assert signal.getsignal(signal.SIGINT) is before


def steps_of(out: Path) -> tuple[list[int], list[int]]:
    """The steps that were trained, and those that were saved."""
    trained = [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    return trained, sorted(
        int(path.name.removeprefix("global_step")) for path in (out / "checkpoints").glob("global_step*")
    )


@pytest.mark.parametrize(
    "rank, name", [(0, "SIGTERM"), pytest.param(1, "SIGTERM", marks=pytest.mark.full), (1, "SIGINT")]
)
def test_a_signal_to_any_rank_saves_and_leaves(run, rank: int, name: str) -> None:
    out = run({rank: name})
    trained, saved = steps_of(out)
    assert 2 <= len(trained) < NEVER and saved == [trained[-1]]
    assert (
        not (out / "hf").exists() and not (out / "completed.json").exists()
    )  # no time for an export, and not finished
    assert (out / "checkpoints" / "latest").read_text() == f"global_step{trained[-1]}"


def test_files_from_before_the_start_ask_nothing_of_the_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for name in ("STOP", "SAVE"):
        (tmp_path / name).touch()
    discard_requests(tmp_path)
    assert list(tmp_path.iterdir()) == [] and f"{tmp_path}/STOP was there before" in capfd.readouterr().err
    discard_requests(tmp_path)
    assert capfd.readouterr().err == ""


@pytest.mark.full
def test_a_stale_stop_does_not_end_the_next_run(run, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "STOP").touch()
    trained, saved = steps_of(run({}, steps=3))
    assert trained == [1, 2, 3] and saved == [3]


def test_the_file_stop_ends_the_run_as_its_last_step_would(run) -> None:
    out = run({0: "STOP"})
    trained, saved = steps_of(out)
    assert 2 <= len(trained) < NEVER and saved == [trained[-1]]
    assert (
        json.loads((out / "completed.json").read_text())["step"] == trained[-1]
        and (out / "hf" / "config.json").is_file()
    )
    assert not (out / "STOP").exists()


def test_the_file_save_saves_and_continues(run) -> None:
    out = run({0: "SAVE"}, steps=20)
    trained, saved = steps_of(out)
    assert trained == list(range(1, 21)) and len(saved) == 2 and 2 <= saved[0] < 20 == saved[1]
    assert not (out / "SAVE").exists()


def test_the_clock_saves_and_old_ones_go(run) -> None:
    out = run({}, "save_minutes=1e-6", "keep_last=2", steps=6)
    assert steps_of(out)[1] == [5, 6]


def train_with_workers_killed(case: Case, signum: int) -> None:
    """On a rank: a run whose data workers are killed at its final save. signum: ends the run; 0: the last step does."""
    from training.checkpoint.writer import CheckpointWriter

    save = CheckpointWriter.save

    def save_without_workers(writer: CheckpointWriter, state: TrainerState) -> None:
        workers = multiprocessing.active_children()
        assert workers
        for worker in workers:
            worker.kill()
            worker.join()
        save(writer, state)

    CheckpointWriter.save = save_without_workers
    asked = {} if signum == 0 else {0: signal.Signals(signum).name}
    train_while_asked(case, asked)


@pytest.mark.parametrize("signum", [0, signal.SIGTERM])
def test_a_run_that_ends_is_saved_without_its_data_workers(root: Path, tmp_path: Path, signum: int) -> None:
    out, steps = tmp_path / "out", NEVER if signum else 3
    case = Case(root / "hf", root / "train.jsonl", root, 1, 1, steps, (f"output_dir={out}", "num_workers=2", *EVERY))
    with closing(WorkerGroup(1, tmp_path)) as group:  # a process of its own: what it does about dead workers stays
        group.run(train_with_workers_killed, case, signum)
    trained, saved = steps_of(out)
    assert saved == [trained[-1]]


def train_and_signal(case: Case, place: str) -> tuple[int, int]:
    """On a rank: a run that rank 1 sends SIGTERM to, in an evaluation or in a save. Returns how many groups of
    micro-batches were evaluated, and the signal that ended the run."""
    from unittest.mock import patch

    from training.checkpoint import writer
    from training.engine.pipeline_engine import PipelineStage
    from training.loop import TrainingLoop

    groups, signums, is_signalled = 0, [0], os.environ["RANK"] == "1"
    forward_only, write_share, run = PipelineStage.forward_only, writer.write_share, TrainingLoop.run

    def evaluate_group(*arguments: Any) -> list[Any]:
        nonlocal groups
        groups += 1
        if place == "evaluation" and groups == 2 and is_signalled:
            os.kill(os.getpid(), signal.SIGTERM)
        return forward_only(*arguments)

    def write_slowly(*arguments: Any, **named: Any) -> Any:
        if place == "save" and is_signalled:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(2)
        return write_share(*arguments, **named)

    def run_and_keep(loop: TrainingLoop) -> TrainerState:
        state = run(loop)
        signums.append(loop.signum)
        return state

    with (
        patch.object(PipelineStage, "forward_only", evaluate_group),
        patch.object(writer, "write_share", write_slowly),
        patch.object(TrainingLoop, "run", run_and_keep),
    ):
        train_run(case)
    return groups, signums[-1]


def test_a_signal_ends_an_evaluation(workers: Callable[[int], WorkerGroup], root: Path, tmp_path: Path) -> None:
    out, records = tmp_path / "out", root / "many.jsonl"
    save_records(records, 200)
    overrides = (f"output_dir={out}", f"eval_file={records}", "eval_on_start=false", "eval_steps=3", *EVERY)
    case = Case(root / "hf", root / "train.jsonl", root, 2, 2, 3, overrides)
    results = workers(2).run(train_and_signal, case, "evaluation")
    assert results == [(2, signal.SIGTERM)] * 2  # of 13 groups
    assert steps_of(out) == ([1, 2, 3], [3]) and not (out / "completed.json").exists()

    # Continued, it first makes that evaluation
    case = replace(case, steps=4, overrides=(*overrides, "resume=latest", "resume_allow_changes=true"))
    results = workers(2).run(train_and_signal, case, "")
    assert results == [(2 * 13, 0)] * 2
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "eval_loss" in line] == [3, 4]
    assert json.loads((out / "completed.json").read_text())["eval_loss"] > 0 and (out / "hf" / "config.json").is_file()


@pytest.mark.parametrize("ends", [False, True], ids=["in between", "at the end"])
def test_a_save_is_finished_and_the_signal_acted_on_after_it(
    workers: Callable[[int], WorkerGroup], root: Path, tmp_path: Path, ends: bool
) -> None:
    out = tmp_path / "out"
    overrides = (f"output_dir={out}", "save_steps=2", "grace_seconds=0.5", f"async_save={ends}", *EVERY)
    case = Case(root / "hf", root / "train.jsonl", root, 2, 2, 2 if ends else NEVER, overrides)
    assert workers(2).run(train_and_signal, case, "save") == [(0, signal.SIGTERM)] * 2
    assert steps_of(out) == ([1, 2], [2]) and not (out / "completed.json").exists()


STUCK = """
import os, signal, sys, threading, time
import torch.distributed as dist
sys.path.insert(0, {root!r})
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
from pathlib import Path
from training.distributed.interrupts import Interrupts
interrupts = Interrupts(Path("."), grace_seconds=0.3, save_minutes=None, is_main=True).start()
os.kill(os.getpid(), signal.SIGTERM)
time.sleep({seconds})
print(interrupts.agree())
interrupts.close()
time.sleep(0.5)
"""


@pytest.mark.parametrize("seconds, code", [(60, 143), (0, 0)], ids=["stuck", "in time"])
def test_a_step_that_does_not_end_ends_the_process(tmp_path: Path, seconds: int, code: int) -> None:
    started = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-c", STUCK.format(root=str(ROOT), seconds=seconds)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert ended.returncode == code, ended.stderr
    assert time.monotonic() - started < 40
    assert (
        "error: SIGTERM: the step did not end within grace_seconds=0.3; leaving without a save" in ended.stderr
    ) == (code == 143)


NESTED = """
import os, signal, sys, time
sys.path.insert(0, {root!r})
from training.distributed.interrupts import SignalListener, leave_on_signals
from training.distributed.ranks import SINGLE_PROCESS
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # as without nohup
signal.signal(signal.SIGINT, signal.default_int_handler)  # as in the foreground
seen = []
with leave_on_signals(SINGLE_PROCESS, lambda: print("told", flush=True)):
    inner = SignalListener(seen.append)
    inner.start()
    os.kill(os.getpid(), signal.SIGHUP)
    while not seen:
        time.sleep(0.01)
    print(signal.Signals(seen[0]).name, flush=True)
    {closed}
    {then}
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(0.5)
print("ended", flush=True)
"""


@pytest.mark.parametrize(
    "closed, then, code, lines",
    [
        # The inner one has its place until it is closed, then the outer one, then Python's own handler
        ("inner.close()", "os.kill(os.getpid(), signal.SIGINT); time.sleep(60)", 130, ["SIGHUP", "told"]),
        ("inner.close()", "", -15, ["SIGHUP"]),
        # An inner one that is kept stays when the outer one has ended
        ("inner.keep_until_exit()", "", 0, ["SIGHUP", "ended"]),
    ],
)
def test_listeners_within_each_other(tmp_path: Path, closed: str, then: str, code: int, lines: list[str]) -> None:
    text = NESTED.format(root=str(ROOT), closed=closed, then=then)
    ended = run_code(text, tmp_path)
    found = [line for line in ended.stdout.splitlines() if "stopped by" not in line]
    assert (ended.returncode, found) == (code, lines), ended.stderr
    assert ("stopped by SIGINT outside of training steps" in ended.stdout + ended.stderr) == (code == 130)


FORKED = """
import multiprocessing, sys, time
sys.path.insert(0, {root!r})
from training.distributed.interrupts import SignalListener
listener = SignalListener(print)
listener.start()
worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), daemon=True)
worker.start()
listener.close()
print("closed", worker.is_alive(), flush=True)
worker.kill()
"""


def test_a_listener_ends_beside_processes_that_were_forked_since(tmp_path: Path) -> None:
    """As data workers are: a run that ends with an error still has them."""
    ended = run_code(FORKED.format(root=str(ROOT)), tmp_path)
    assert ended.stdout == "closed True\n", ended.stderr
