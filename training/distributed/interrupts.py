"""Requests to a run from outside: SIGTERM, SIGINT, SIGHUP, the files STOP and SAVE in output_dir, and the interval
`save_minutes`.

Whichever rank receives one, all ranks act at the same step boundary: one all-reduce of four numbers on the host, at a
point where the ranks have just synchronized anyway (the gradient norm and the loss are reduced over all of them). An
evaluation and a save are asked for signals too, since a step may be long after them. Before the first step and while a
model is exported or only evaluated there is nothing to save: a signal ends the process, and the others, where they have
joined, are told first (`leave_on_signals`), or they would report it as lost.

A signal may arrive while the main thread is in a collective, where Python runs no handler: the interpreter's C handler
writes a byte into a socket, and a thread reads it (`SignalListener`). If the step does not end within `grace_seconds`,
in which saves do not count, the process exits and no checkpoint is touched: the one being written has its temporary
name.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

import console
from training.distributed.ending import record_end
from training.distributed.leaving import is_saving
from training.distributed.ranks import Ranks

STOP_NAME, SAVE_NAME = "STOP", "SAVE"
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_SECONDS_BETWEEN_LOOKS = 0.1


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


class EvaluationInterrupted(Exception):
    """A signal ends the run during an evaluation; raised on all ranks at the same point."""


def discard_requests(output_dir: Path) -> None:
    """Remove the files STOP and SAVE that are there before a run starts: they were for an earlier one. Main rank
    only."""
    for name in (STOP_NAME, SAVE_NAME):
        if (output_dir / name).exists():
            (output_dir / name).unlink()
            console.say(f"{output_dir / name} was there before this run started: removed, and not acted on")


class SignalListener:
    """Calls `act` in a thread with the number of the first signal that this process receives, from `start` to `close`.
    One that starts later takes its place until it closes."""

    def __init__(self, act: Callable[[int], None]) -> None:
        self._act = act

    def start(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()  # under nohup
        received = [signum for signum in _SIGNALS if signum not in ignored]
        self._handlers = {signum: signal.signal(signum, _wake) for signum in received}
        self._before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, args=(self._reader,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Restore what was there before, and wait for the end of the thread, which would otherwise hold process groups
        while the interpreter ends: gloo aborts then. A listener that took this one's place, and was kept until the
        exit, stays."""
        current = signal.set_wakeup_fd(self._before)
        if current != self._writer.fileno():
            signal.set_wakeup_fd(current)
        else:
            for signum, handler in self._handlers.items():
                signal.signal(signum, handler)
        self._writer.shutdown(socket.SHUT_WR)  # ends the thread, also where data workers have inherited this end
        self._writer.close()
        self._thread.join()

    def keep_until_exit(self) -> None:
        """Stay, whatever is called from now on."""
        self._writer.detach()  # the handler's file descriptor outlives this object

    def _listen(self, reader: socket.socket) -> None:
        with reader:
            while received := reader.recv(1):  # the signal's number
                if received[0] in _SIGNALS:
                    self._act(received[0])
                    return


@contextmanager
def leave_on_signals(ranks: Ranks, notify: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Within this context a signal ends the process at once: there is nothing to save. Where an `Interrupts` has
    started, the signal is for that.

    notify: tells the other ranks, once they have joined, that this one is about to leave.
    """

    def leave(signum: int) -> None:
        notify()
        text = f"stopped by {signal.Signals(signum).name} outside of training steps: nothing was to be saved"
        record_end(exit_code(signum), text)
        if ranks.is_main:
            _say(f"{text}; continue with resume=auto")
        os._exit(exit_code(signum))

    listener = SignalListener(leave)
    listener.start()
    try:
        yield
    finally:
        listener.close()


@contextmanager
def noticing_signals() -> Iterator[threading.Event]:
    """Within this context a signal only sets the event that is yielded: there is nothing left to save."""
    noticed = threading.Event()
    listener = SignalListener(lambda signum: noticed.set())
    listener.start()
    try:
        yield noticed
    finally:
        listener.close()


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
        self._signum = 0
        self._is_saving = False
        self._agreed = threading.Event()
        self._last_save = time.monotonic()
        self._listener = SignalListener(self._receive)

    def start(self) -> Interrupts:
        """Start to receive signals. Returns self."""
        self._listener.start()
        return self

    def close(self) -> None:
        """Restore the previous signal handlers."""
        self._agreed.set()
        self._listener.close()

    def keep_until_exit(self) -> None:
        """Keep the signal handlers: launchers repeat their signals, and the next one would kill a rank that is about to
        exit, which the others would report as lost."""
        self._listener.keep_until_exit()

    def agree(self, nonfinite: bool = False) -> Interrupt:
        """Return the action of all ranks now, the same on each. nonfinite: whether the last step's loss or gradient was
        not finite on this rank.

        The files are removed, so that one file is one request.
        """
        stop = self._is_main and (self._output_dir / STOP_NAME).exists()
        save = self._is_main and ((self._output_dir / SAVE_NAME).exists() or self._is_time())
        signum, *requested = self._reduce(self._signum, stop, save, nonfinite)
        request = Interrupt(signum, *map(bool, requested))
        if request.stop:
            self._agreed.set()
        if self._is_main:
            for name, is_requested in ((STOP_NAME, request.stop), (SAVE_NAME, request.save)):
                if is_requested:
                    (self._output_dir / name).unlink(missing_ok=True)
        return request

    def agree_on_signal(self) -> int:
        """Return the number of the signal that some rank has received, the same on all ranks; 0 for none."""
        (signum,) = self._reduce(self._signum)
        return signum

    def check_evaluation(self) -> None:
        """Raise EvaluationInterrupted on all ranks when any has received a signal. All ranks call it."""
        if self.agree_on_signal():
            raise EvaluationInterrupted

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Within this context `grace_seconds` does not run: a save is finished."""
        self._is_saving = True
        try:
            yield
        finally:
            self._is_saving = False

    def _reduce(self, signum: int, *flags: bool) -> list[int]:
        numbers = torch.tensor([signum, *flags], dtype=torch.int32)
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=self._group)
        if numbers[0]:
            self._agreed.set()
        return numbers.tolist()

    def saved(self) -> None:
        """Restart the interval `save_minutes`."""
        self._last_save = time.monotonic()

    def _is_time(self) -> bool:
        return self._save_seconds is not None and time.monotonic() - self._last_save >= self._save_seconds

    def _receive(self, signum: int) -> None:
        self._signum = signum
        name = signal.Signals(signum).name
        if self._is_main:
            _say(f"{name}: saving at the end of this step, then leaving")
        if not self._is_agreed_in_time():
            text = f"{name}: the step did not end within grace_seconds={self._grace_seconds:g}; leaving without a save"
            _say(f"error: {text}, continue with resume=auto")
            record_end(exit_code(self._signum), text)
            os._exit(exit_code(self._signum))

    def _is_agreed_in_time(self) -> bool:
        seconds_left = self._grace_seconds
        while seconds_left > 0:
            started = time.monotonic()
            if self._agreed.wait(min(_SECONDS_BETWEEN_LOOKS, seconds_left)):
                return True
            if not self._is_saving and not is_saving():
                seconds_left -= time.monotonic() - started
        return False


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
