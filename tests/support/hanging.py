"""A callback of a run whose export hangs: that of rank 0, which comes after the loop."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import console
from training import run as training_run

SEEN = "the export hangs"


def sleep(*_: object) -> None:
    """As a write to a disk that does not answer."""
    console.say(SEEN)
    time.sleep(3600)


def stop(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


class HangInExport:
    """how: `sleep` or `stop`."""

    def __init__(self, how: str) -> None:
        self._hang = {"sleep": sleep, "stop": stop}[how]

    def on_end(self, run: Any) -> None:
        assert "export_end" in vars(training_run)
        vars(training_run)["export_end"] = self._hang
