"""Signals through the real launchers to a whole run and its data workers: it saves, and nothing is left."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from support.launching import Ended, Launch, run_deepspeed, run_torchrun
from test_launcher import arguments, read_metrics, root  # noqa: F401  (fixture)


def signal_launcher(launch: Launch, signum: int) -> None:
    launch.process.send_signal(signum)


def signal_tree(launch: Launch, signum: int) -> None:
    """As a scheduler does: every process of the job, the workers first."""
    signal_ranks(launch, signum)
    signal_launcher(launch, signum)


def signal_ranks(launch: Launch, signum: int) -> None:
    """The ranks and their workers, the workers first."""
    for pid in sorted(launch.processes().keys() - {launch.process.pid}, reverse=True):
        os.kill(pid, signum)


@pytest.mark.parametrize(
    ("launcher", "send", "signum", "code"),
    [
        (run_torchrun, signal_tree, signal.SIGTERM, 1),  # torchrun has no other code than 1
        pytest.param(run_torchrun, signal_launcher, signal.SIGTERM, 1, marks=pytest.mark.full),
        pytest.param(run_torchrun, signal_ranks, signal.SIGTERM, 1, marks=pytest.mark.full),
        pytest.param(run_torchrun, signal_tree, signal.SIGINT, 1, marks=pytest.mark.full),
        pytest.param(run_deepspeed, signal_tree, signal.SIGTERM, -signal.SIGTERM, marks=pytest.mark.full),
    ],
)
def test_a_signal_to_all_processes_saves(
    launcher: Callable[..., Ended],
    send: Callable[[Launch, int], None],
    signum: signal.Signals,
    code: int,
    root: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    out = tmp_path / "out"

    def interrupt(launch: Launch) -> None:
        launch.wait_for("step 2/")
        send(launch, signum)

    ended = launcher(
        arguments(root, out, "max_steps=100000", "num_workers=2", "save_steps=null"), tmp_path, while_running=interrupt
    )
    assert (ended.left_alive, ended.errors()) == ([], []), ended.output
    step = int(read_metrics(out)[-1]["step"])
    assert f"stopped by {signum.name} at step {step}; continue with resume=latest" in ended.output
    assert (out / "checkpoints" / "latest").read_text() == f"global_step{step}"
    assert ended.code == code, ended.output
    if send is signal_ranks:  # the launcher says how the first of them ended, and ends the others
        assert f"exitcode  : {128 + signum} " in ended.output, ended.output
