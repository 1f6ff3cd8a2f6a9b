"""Starts the processes of a row with a time limit, and ends all of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu_parts.machine import ROOT, Machine
from training.distributed.ranks import find_free_port

TRAINER = ROOT / "trainer_base_ds_mp.py"
_MARK = "GPU_REPORT_ROW"  # in the environment of each process of a row, and of theirs
_SECONDS_FOR_THE_OTHERS = 15  # after the first rank has failed: to report, or to end by themselves
_SECONDS_BETWEEN_LOOKS = 0.05
_TAIL = 25  # lines of a log that a report shows
# What the libraries say when memory is gone: torch's allocator, CUDA, and the system that killed the process.
_OUT_OF_MEMORY = ("OutOfMemoryError", "CUDA out of memory", "CUDA error: out of memory", "DefaultCPUAllocator: can't")


STOPPED = threading.Event()  # the user has asked to end: every wait ends, and its processes


def stop_on_signals() -> None:
    """Raise KeyboardInterrupt at SIGTERM too: a time limit from outside ends the rows as well."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop_once)


def _stop_once(signum: int, frame: object) -> None:
    """Launchers and `timeout` repeat their signals, and the first one is enough."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


class RowFailed(Exception):
    """A process of a row ended with an error, or did not end in time."""

    def __init__(self, text: str, tail: str = "", out_of_memory: bool = False) -> None:
        super().__init__(text)
        self.tail, self.out_of_memory = tail, out_of_memory


class TimeLimit(RowFailed):
    """It did not end in time."""


class Deadline:
    """When a row must have ended, with all that it starts."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self._at = seconds, time.monotonic() + seconds

    def left(self) -> float:
        """Seconds."""
        return max(0.0, self._at - time.monotonic())


@dataclass(frozen=True)
class Command:
    """One process to start. environment: added to that of this process."""

    words: Sequence[str]
    environment: dict[str, str]


def list_ranks(machine: Machine, world_size: int, words: Sequence[str]) -> list[Command]:
    """Returns one process per rank, with the variables that `torchrun` would set."""
    shared = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_port())}
    return [
        Command(words, {**shared, **machine.rank_environment(rank, world_size), "RANK": str(rank)})
        for rank in range(world_size)
    ]


def run(commands: Sequence[Command], log: Path, deadline: Deadline, until: Callable[[], bool] | None = None) -> float:
    """Runs them side by side, their output in `log`; returns the seconds that it took.

    until: what makes them be killed, and that a success. Raises RowFailed when one fails (the others are then ended),
    TimeLimit at the deadline.
    """
    mark, started = uuid.uuid4().hex, time.monotonic()
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "a") as output:
        processes = [_start(command, mark, output) for command in commands]
    try:
        _wait(processes, log, deadline, until)
    finally:
        _end(processes, mark)
    return time.monotonic() - started


def run_python(machine: Machine, words: Sequence[str], log: Path, deadline: Deadline) -> float:
    """Runs one Python process that may use the whole machine; see `run`."""
    return run([Command([sys.executable, *words], machine.environment())], log, deadline)


class Worker:
    """A process that is kept: it reads jobs, one per line, and writes the result of each to the job's file.

    A job that fails or does not end in time ends the process, and the next one starts another. So does one whose result
    says that it was the last.
    """

    def __init__(self, command: Callable[[], Command], logs: Path) -> None:
        """command: makes what is started; a process that is restarted needs a port of its own. logs: the folder of its
        output and of the results."""
        self._command, self._logs = command, logs
        self._process: subprocess.Popen[bytes] | None = None
        self._count = 0  # of jobs

    def send(self, job: dict[str, object]) -> None:
        """Start a job, whose result `receive` returns."""
        self._count += 1
        if self._process is None or self._process.poll() is not None:
            self._start()
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(json.dumps({**job, "result": str(self._result)}).encode() + b"\n")
        self._process.stdin.flush()

    def receive(self, deadline: Deadline) -> dict[str, Any]:
        """Return the result of the job. Raises RowFailed, TimeLimit."""
        assert self._process is not None
        try:
            _wait([self._process], self._log, deadline, self._result.exists)
            if not self._result.exists():
                raise RowFailed("ended without a result", read_tail(self._log))
        except BaseException:
            self.end()
            raise
        found = json.loads(self._result.read_text())
        if found.get("is_last"):
            self.end()
        return found

    def end(self) -> None:
        """End the process, and what it has started."""
        if self._process is not None:
            _end([self._process], self._mark)
            self._process = None

    @property
    def _result(self) -> Path:
        return self._logs / f"result_{self._count}.json"

    def _start(self) -> None:
        self._mark, self._log = uuid.uuid4().hex, self._logs / f"worker_{self._count}.log"
        self._logs.mkdir(parents=True, exist_ok=True)
        with open(self._log, "a") as output:
            self._process = _start(self._command(), self._mark, output, stdin=subprocess.PIPE)


def _start(command: Command, mark: str, output: object, stdin: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
    folder = Path(sys.executable).parent
    environment = {
        **os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1",
        "PATH": f"{folder}:{os.environ.get('PATH', '')}", **command.environment, _MARK: mark,
    }  # fmt: skip
    environment["PYTHONPATH"] = f"{ROOT}:{os.environ['PYTHONPATH']}" if "PYTHONPATH" in os.environ else str(ROOT)
    return subprocess.Popen(
        list(command.words), cwd=ROOT, env=environment, stdin=stdin, stdout=output, stderr=output,
        start_new_session=True,
    )  # fmt: skip


def _wait(
    processes: Sequence[subprocess.Popen[bytes]], log: Path, deadline: Deadline, until: Callable[[], bool] | None
) -> None:
    while True:
        codes = [process.poll() for process in processes]
        if until is not None and until():
            return
        if any(codes):
            _wait_for_others(processes)
            code = next(code for code in codes if code)
            tail = read_tail(log)
            is_memory = code == -signal.SIGKILL or any(
                sign in log.read_text(errors="replace") for sign in _OUT_OF_MEMORY
            )
            raise RowFailed(f"ended with code {code}", tail, is_memory)
        if all(code == 0 for code in codes):
            return
        if STOPPED.is_set():
            raise RowFailed("interrupted", read_tail(log))
        if not deadline.left():
            raise TimeLimit("did not end in time", read_tail(log))
        time.sleep(_SECONDS_BETWEEN_LOOKS)


def _wait_for_others(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + _SECONDS_FOR_THE_OTHERS
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        time.sleep(_SECONDS_BETWEEN_LOOKS)


def _end(processes: Sequence[subprocess.Popen[bytes]], mark: str) -> None:
    """Kills what is left: those that were started here, and what they have started, by the mark they inherited."""
    while left := [process.pid for process in processes if process.poll() is None] + _list_marked(mark):
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    for process in processes:
        process.wait()


def _list_marked(mark: str) -> list[int]:
    wanted, found = f"{_MARK}={mark}".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended, or is another user's
            if wanted in (folder / "environ").read_bytes().split(b"\0") and ") Z " not in (folder / "stat").read_text():
                found.append(int(folder.name))
    return found


def read_tail(log: Path) -> str:
    """The last lines of a log that say something; a progress bar's repeated states are one line."""
    if not log.exists():
        return ""
    lines = [line.rpartition("\r")[2].rstrip() for line in log.read_text(errors="replace").splitlines()]
    return "\n".join([line for line in lines if line][-_TAIL:])
