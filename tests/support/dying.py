"""A callback of a run in which a rank ends in the middle of a step, while the others wait in a call that never returns,
as they do in NCCL's."""

from __future__ import annotations

import os
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from training.checkpoint import writer
from training.engine.pipeline_engine import PipelineStage

SECONDS_OF_A_SLOW_SAVE = 8


class DieInStep:
    """rank: the one that ends after the step `after`. how: `raise` or `kill`. slow: the part of a save that takes long,
    by its name in the writer's module; empty for none."""

    def __init__(self, rank: int, how: str, after: int = 2, slow: str = "") -> None:
        self._rank, self._after, self._slow = rank, after, slow
        self._die = {"raise": run_out_of_memory, "kill": be_killed}[how]

    def on_step(self, run: Any) -> None:
        if run.step == self._after:
            die: Any = self._die if run.rank == self._rank else wait_forever
            PipelineStage.train_step = die  # type: ignore[method-assign]
            if self._slow:
                vars(writer)[self._slow] = slow_down(getattr(writer, self._slow))


class FillDisk:
    """Leaves no room on the disk of the run's folder after the first step."""

    def on_step(self, run: Any) -> None:
        if run.step == 1 and run.rank == 0:
            with open(Path(run.output_dir) / "filler", "wb") as stream:
                while free := shutil.disk_usage(run.output_dir).free:
                    with suppress(OSError):  # something else has taken some of it meanwhile
                        os.posix_fallocate(stream.fileno(), stream.seek(0, os.SEEK_END), free)


def run_out_of_memory(*_: object, **__: object) -> None:
    time.sleep(1)  # a save has begun
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")


def be_killed(*_: object, **__: object) -> None:
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)


def wait_forever(*_: object, **__: object) -> None:
    time.sleep(3600)


def slow_down(function: Any) -> Any:
    def run(*arguments: Any, **named: Any) -> Any:
        time.sleep(SECONDS_OF_A_SLOW_SAVE)
        return function(*arguments, **named)

    return run
