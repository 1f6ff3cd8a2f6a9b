"""Requests to a run from outside: SIGTERM, SIGINT, the files STOP and SAVE in output_dir, and the interval
`save_minutes`.

Whichever rank receives one, all ranks act at the same step boundary: one all-reduce of four numbers on the host, at a
point where the ranks have just synchronized anyway (the gradient norm and the loss are reduced over all of them).

A signal may arrive while the main thread is in a collective, where Python runs no handler: the interpreter's C handler
writes a byte into a socket, and a thread reads it. If the step does not end within `grace_seconds`, the process exits
and no checkpoint is touched: the one being written has its temporary name.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

import console

STOP_NAME, SAVE_NAME = "STOP", "SAVE"
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True)
class Interrupt:
    """The action of all ranks at a step boundary."""

    signum: int = 0  # save and exit, without evaluation and export; 0: no signal
    stop: bool = False  # save and end as after the last step
    save: bool = False
    nonfinite: bool = False  # the step's loss or gradient is not finite on some rank

    @property
    def ends(self) -> bool:
        return self.stop or self.signum > 0


class Interrupts:
    """Receives requests from `start` to `close`. All ranks call `agree` after each step."""

    def __init__(
        self,
        output_dir: Path,
        grace_seconds: float,
        save_minutes: float | None,
        is_main: bool,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """group: of all ranks, for tensors in host memory; None for the default group."""
        self._output_dir, self._grace_seconds, self._is_main = output_dir, grace_seconds, is_main
        self._save_seconds = None if save_minutes is None else 60 * save_minutes
        self._group = group
        self._numbers = torch.zeros(4, dtype=torch.int32)
        self._signum = 0
        self._agreed = threading.Event()
        self._last_save = time.monotonic()

    def start(self) -> Interrupts:
        """Install the signal handlers, and start the thread that receives signals. Returns self."""
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._handlers = {signum: signal.signal(signum, _wake) for signum in _SIGNALS}
        self._wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._listen, args=(self._reader,), daemon=True).start()
        return self

    def close(self) -> None:
        """Restore the previous signal handlers, and end the thread."""
        signal.set_wakeup_fd(self._wakeup)
        for signum, handler in self._handlers.items():
            signal.signal(signum, handler)
        self._agreed.set()
        self._writer.close()  # ends the thread

    def agree(self, nonfinite: bool = False) -> Interrupt:
        """Return the action of all ranks now, the same on each. nonfinite: whether the last step's loss or gradient was
        not finite on this rank.

        The files are removed, so that one file is one request.
        """
        stop = self._is_main and (self._output_dir / STOP_NAME).exists()
        save = self._is_main and ((self._output_dir / SAVE_NAME).exists() or self._is_time())
        for place, number in enumerate((self._signum, stop, save, nonfinite)):
            self._numbers[place] = int(number)
        dist.all_reduce(self._numbers, op=dist.ReduceOp.MAX, group=self._group)
        signum, *requested = self._numbers.tolist()
        request = Interrupt(signum, *map(bool, requested))
        if request.ends:
            self._agreed.set()
        if self._is_main:
            for name, is_requested in ((STOP_NAME, request.stop), (SAVE_NAME, request.save)):
                if is_requested:
                    (self._output_dir / name).unlink(missing_ok=True)
        return request

    def saved(self) -> None:
        """Restart the interval `save_minutes`."""
        self._last_save = time.monotonic()

    def _is_time(self) -> bool:
        return self._save_seconds is not None and time.monotonic() - self._last_save >= self._save_seconds

    def _listen(self, reader: socket.socket) -> None:
        with reader:
            while not self._signum:
                received = reader.recv(1)  # the signal's number
                if not received:
                    return
                if received[0] in _SIGNALS:
                    self._signum = received[0]
        name = signal.Signals(self._signum).name
        if self._is_main:
            _say(f"{name}: saving at the end of this step, then leaving")
        if not self._agreed.wait(self._grace_seconds):
            _say(
                f"error: {name}: the step did not end within grace_seconds={self._grace_seconds:g}; leaving without "
                "a save, continue with resume=latest"
            )
            os._exit(exit_code(self._signum))


def exit_code(signum: int) -> int:
    """Return the exit code that shells and schedulers expect from a process that a signal ended."""
    return 128 + signum


def tolerate_dead_workers() -> None:
    """From now on, in this process, a data worker that dies raises nothing in the main thread.

    torch's handler of SIGCHLD raises wherever that thread is, during a save for example, which needs no worker. A step
    that does need one still fails: the loader looks at its workers whenever a batch takes long (torch 2.13.0).
    """
    signal.signal(signal.SIGCHLD, _ignore)  # SIG_DFL prints an error where one has arrived already (CPython)


def _wake(signum: int, frame: object) -> None:
    """Replaces the default handler, which would end the process. The thread acts on the byte in the socket."""
    tolerate_dead_workers()


def _ignore(signum: int, frame: object) -> None:
    pass


def _say(text: str) -> None:
    console.say_last(text)  # either way no further step is shown
