"""Signals through the real launchers to a whole run and its data workers: it saves, and nothing is left."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

import pytest
from support.hanging import SEEN
from support.launching import ROOT, Ended, Launch, run_deepspeed, run_slurm, run_supervised, run_torchrun
from support.tiny import save_pairs
from test_launcher import arguments, read_metrics, root  # noqa: F401  (fixture)

from training.checkpoint.run_folder import RunFolder

TERM, INT, HUP, KILL = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL


def signal_launcher(launch: Launch, signum: int) -> None:
    """As `kill`, systemd's KillMode=process and many schedulers do."""
    launch.process.send_signal(signum)


def signal_ranks(launch: Launch, signum: int) -> None:
    """The ranks and their workers, the workers first."""
    for pid in sorted(launch.processes().keys() - {launch.process.pid}, reverse=True):
        os.kill(pid, signum)


def signal_tree(launch: Launch, signum: int) -> None:
    """As a terminal and most schedulers do: every process of the job, the workers first."""
    signal_ranks(launch, signum)
    signal_launcher(launch, signum)


def start(launcher: str, given: Sequence[str], out: Path, folder: Path, interrupt: Callable[[Launch], None]) -> Ended:
    if launcher == "supervise":
        return run_supervised(out, given, folder, interrupt)
    run = {"deepspeed": run_deepspeed, "torchrun": run_torchrun, "slurm": run_slurm}[launcher]
    return run(given, folder, while_running=interrupt)


# What the launcher returns. That of `deepspeed` itself ends at once, that of torchrun has no other code than 1.
CODES = {
    "deepspeed": lambda signum: -signum,
    "torchrun": lambda signum: -KILL if signum == KILL else 1,
    "supervise": lambda signum: 128 + signum,
    "slurm": lambda signum: 128 + signum,
}
SENT = [*product(("deepspeed", "torchrun", "supervise"), (signal_launcher, signal_tree)), ("slurm", signal_ranks)]
MATRIX = [(*sent, signum, workers) for sent, signum, workers in product(SENT, (TERM, INT), (0, 2))]
ALSO = [
    ("torchrun", signal_ranks, TERM, 2),
    ("deepspeed", signal_tree, HUP, 2),  # a terminal that closes
    ("supervise", signal_launcher, HUP, 0),
    ("torchrun", signal_launcher, KILL, 0),
]
SHORT = [("torchrun", signal_tree, TERM, 2), ("deepspeed", signal_launcher, TERM, 0)]


@pytest.mark.parametrize(
    ("launcher", "send", "signum", "num_workers"),
    [*SHORT, *(pytest.param(*case, marks=pytest.mark.full) for case in (*MATRIX, *ALSO) if case not in SHORT)],
)
def test_a_signal_saves_and_nothing_is_left(
    launcher: str,
    send: Callable[[Launch, int], None],
    signum: signal.Signals,
    num_workers: int,
    root: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    out = tmp_path / "out"

    def interrupt(launch: Launch) -> None:
        launch.wait_for("step 2/")
        send(launch, signum)
        launch.wait_until_gone()

    given = arguments(root, out, "max_steps=100000", f"num_workers={num_workers}", "save_steps=null")
    ended = start(launcher, given, out, tmp_path, interrupt)
    assert (ended.left_alive, ended.errors()) == ([], []), ended.output
    step = int(read_metrics(out)[-1]["step"])
    names = {signum.name}
    if launcher == "deepspeed" or signum == KILL or (launcher == "supervise" and send is signal_tree):
        # A launcher that is gone counts as SIGTERM; the inner one of `deepspeed`, which supervise starts, also sends it
        names = {TERM.name} if send is signal_launcher else {TERM.name, signum.name}
    stops = [f"stopped by {name} at step {step}; continue with resume=latest" for name in names]
    assert any(stop in ended.output for stop in stops), ended.output
    assert (out / "checkpoints" / "latest").read_text() == f"global_step{step}"
    assert ended.code == CODES[launcher](signum), ended.output
    record = RunFolder(out).read_ended()
    assert record["reason"] == "signal" and record["code"] in {128 + signal.Signals[name] for name in names}, record
    if (launcher, send) == ("torchrun", signal_ranks):  # it says how the first of them ended, and ends the others
        assert f"exitcode  : {128 + signum} " in ended.output, ended.output


@pytest.mark.full
@pytest.mark.parametrize("send", [signal_launcher, signal_tree])
def test_a_signal_while_tokenizing_ends_the_run_at_once(
    send: Callable[[Launch, int], None],
    root: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    out, cache = tmp_path / "out", tmp_path / "cache"
    records = tmp_path / "many.jsonl"
    records.write_text(2000 * (root / "train.jsonl").read_text())

    def interrupt(launch: Launch) -> None:
        while not list(cache.glob("*.lock")):
            assert launch.process.poll() is None, launch.log.read_text()
            time.sleep(0.01)
        time.sleep(1)  # its processes have started
        send(launch, TERM)
        launch.wait_until_gone(30)

    given = arguments(root, out, f"train_file={records}", f"data.cache_dir={cache}", "data.num_proc=2")
    ended = run_deepspeed(given, tmp_path, while_running=interrupt)
    assert (ended.left_alive, ended.errors()) == ([], []), ended.output
    assert not (out / "metrics.jsonl").exists() and list(cache.glob("*.lock"))
    assert "samples" not in ended.output, "it was still tokenizing"


@pytest.mark.full
@pytest.mark.parametrize("send", [signal_launcher, signal_tree])
def test_a_signal_while_a_model_is_exported_ends_the_run_at_once(
    send: Callable[[Launch, int], None],
    root: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No rank is reported as lost; continued, the run exports."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))
    out = tmp_path / "out"

    def interrupt(launch: Launch) -> None:
        launch.wait_for(SEEN)
        send(launch, TERM)
        launch.wait_until_gone(30)

    hangs = "callbacks=[{_target_: support.hanging.HangInExport, how: sleep}]"
    ended = run_deepspeed(arguments(root, out, hangs), tmp_path, while_running=interrupt)
    assert (ended.left_alive, ended.errors()) == ([], []), ended.output
    assert "stopped by SIGTERM outside of training steps: nothing was to be saved" in ended.output
    ended = run_deepspeed(arguments(root, out, "resume=auto"), tmp_path)
    assert (ended.code, ended.left_alive) == (0, []) and (out / "hf" / "config.json").is_file(), ended.output


@pytest.mark.full
@pytest.mark.parametrize("send", [signal_launcher, signal_tree])
def test_a_signal_while_references_are_scored_ends_the_run_at_once(
    send: Callable[[Launch, int], None],
    root: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    """Nothing is half done: the run that follows scores them."""
    out, cache = tmp_path / "out", tmp_path / "cache"
    few = save_pairs(tmp_path / "few.jsonl", 100).read_text()
    (tmp_path / "many.jsonl").write_text(200 * few)

    def interrupt(launch: Launch) -> None:
        launch.wait_for("reference log-probabilities of train_file: ")
        send(launch, TERM)
        launch.wait_until_gone(30)

    keys = ("data=preference", "task=dpo", f"data.cache_dir={cache}", "eval_file=null", "max_steps=2")
    given = arguments(root, out, f"train_file={tmp_path}/many.jsonl", *keys)
    ended = run_deepspeed(given, tmp_path, while_running=interrupt)
    assert (ended.left_alive, ended.errors()) == ([], []), ended.output
    assert "stopped by SIGTERM outside of training steps: nothing was to be saved" in ended.output
    assert not (out / "metrics.jsonl").exists() and "done" not in ended.output
    (tmp_path / "many.jsonl").write_text(few)
    ended = run_deepspeed(given, tmp_path)
    assert (ended.code, ended.left_alive) == (0, []) and "done, 200 answers" in ended.output, ended.output
