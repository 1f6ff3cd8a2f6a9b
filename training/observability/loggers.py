"""Trackers as reporters: the same curves, facts and files for each, and no failure of theirs ends a run. Main rank
only.

A reporter that fails is reported once and dropped. The run continues, and metrics.jsonl has every line.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from console import say
from filesystem import write_atomically
from masking import print_exception
from training.checkpoint.run_folder import RunFolder
from training.config.schema import LoggerConfig, TrackerMode
from training.observability.metrics import Event, Record, Reporter, split_stages
from training.trackers.build import build_trackers
from training.trackers.tracker import TrackedRun, Tracker

_MOST_SECONDS = 120.0  # that a tracker may keep the run waiting; MLflow's own attempts take up to 80

# "config", "environment", "plan", ... -> text or values: facts of the run that are known before its first step.
Facts = Mapping[str, Any]


class IsolatedReporter(Reporter):
    """A reporter that cannot end a run: what it raises, `sys.exit` included, is printed, and it is dropped."""

    def __init__(self, name: str, build: Callable[[], Reporter]) -> None:
        self._name = name
        self._reporter: Reporter | None = None
        self._reporter = self._try(build)

    def report(self, record: Record) -> None:
        self._call("report", record)

    def note(self, event: Event) -> None:
        self._call("note", event)

    def advance(self, step: int) -> None:
        self._call("advance", step)

    def close(self) -> None:
        self._call("close")

    def _call(self, method: str, *arguments: Any) -> None:
        if self._reporter is not None:
            self._try(partial(getattr(self._reporter, method), *arguments))

    def _try(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except (Exception, SystemExit) as error:
            print_exception(error, sys.stdout)  # the rank's log
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            if isinstance(error, SystemExit):
                reason = f"it ended with sys.exit({error.code!r})"
            self._drop(
                f"{self._name}: {reason}; nothing more is logged there. The run continues, with all of its "
                "figures in metrics.jsonl"
            )
            return None

    def _drop(self, message: str) -> None:
        self._reporter = None
        say(message)


class TrackerReporter(Reporter):
    """Passes the records of a run, and the files that it writes, to a tracker."""

    def __init__(self, name: str, tracker: Tracker, run: TrackedRun, facts: Facts) -> None:
        self._tracker, self._run = tracker, run
        with keep_handlers(), limit_time("started"):
            where = tracker.start(run, facts)
        say(f"logger={name}: {where}")
        folder = RunFolder(run.output_dir)
        self._log_files(folder.facts, folder.plan)

    def report(self, record: Record) -> None:
        figures = {key: value for key, value in split_stages(record).items() if key != "step"}
        with limit_time("taken the figures of a step"):
            self._tracker.log_metrics(figures, int(record["step"]))

    def note(self, event: Event) -> None:
        if event.kind == "picture":
            self._log_files(self._run.output_dir / event.text)

    def close(self) -> None:
        self._log_files(RunFolder(self._run.output_dir).report)
        self._tracker.close()

    def _log_files(self, *files: Path) -> None:
        for file in files:
            if self._run.first_step is not None and file.is_file():
                with limit_time(f"taken {file.name}"):
                    self._tracker.log_file(file)


class _TookTooLong(BaseException):
    """Not an Exception, which a package might take for a failed attempt and try again."""


@contextmanager
def limit_time(done: str) -> Iterator[None]:
    """Raise TimeoutError when the block takes longer than a run can wait for a tracker: the other ranks wait too. done:
    what the tracker has not done, for the message. Does nothing outside the main thread, which alone gets signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(signum: int, frame: object) -> None:
        raise _TookTooLong

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, _MOST_SECONDS)
    try:
        yield
    except _TookTooLong:
        raise TimeoutError(f"has not {done} after {_MOST_SECONDS:g} seconds") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def keep_handlers() -> Iterator[None]:
    """Restore the handlers of signals and of uncaught exceptions afterwards: a tracker may set its own (swanlab does
    for SIGINT), and a run saves when it gets a signal."""
    handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    hook = sys.excepthook
    try:
        yield
    finally:
        sys.excepthook = hook
        for signum, handler in handlers.items():
            if handler is not None and signal.getsignal(signum) is not handler:
                signal.signal(signum, handler)


def build_loggers(config: LoggerConfig, output_dir: Path, facts: Facts, first_step: int | None) -> list[Reporter]:
    """Start the trackers of `logger=[NAME, ...]`, each isolated from the run. first_step: None for `evaluate_only`."""
    trackers = build_trackers(config)
    if not trackers:
        return []
    run = identify_run(config, output_dir, first_step)
    return [
        IsolatedReporter(f"logger={name}", partial(TrackerReporter, name, tracker, run, facts))
        for name, tracker in trackers.items()
    ]


def identify_run(config: LoggerConfig, output_dir: Path, first_step: int | None) -> TrackedRun:
    """Return the run as trackers know it. A training run keeps its id in a file of output_dir."""
    run_id, id_file = uuid.uuid4().hex, RunFolder(output_dir).tracker_id
    is_resumed = first_step is not None and id_file.exists()
    if is_resumed:
        run_id = id_file.read_text().strip()
    elif first_step is not None:
        write_atomically(id_file, run_id)
    return TrackedRun(
        output_dir, run_id, config.run_name or output_dir.name, config.project, os.environ.get("WANDB_RUN_GROUP"),
        config.mode is TrackerMode.offline, first_step, is_resumed,
    )  # fmt: skip
