"""Finds a rank that is dead or stuck, names it and ends the run. Otherwise the others would wait for it in a
collective, silently.

*Dead or stopped.* A thread of each rank sends rank 0 a heartbeat once a second, and rank 0 answers, over separate gloo
groups. A connection that closes without notice means that the rank was killed; a rank that sends nothing for
`stuck_minutes` is stopped, or its host is gone. Nothing that the main threads wait for delays this.

*Stuck.* A rank that has made no progress for `stuck_minutes`, neither by a forward pass nor in anything that has a bar
(weights loaded, files checked, bytes saved or exported), inspects its main thread's stack. In a collective it waits for
another rank, and gives that one a quarter of the time more to report itself; anywhere else it is the stuck one, and
names the line. With NCCL the host waits for the GPU anywhere in the engine, so there the first rank reports what it
knows, once no rank makes progress.

The last resort is the timeout of the process groups themselves, over twice as long: for a C call that never returns to
the interpreter.
"""

from __future__ import annotations

import faulthandler
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType, TracebackType

import torch
import torch.distributed as dist

import console
from models.parallel.exchanges import wait_for
from training.distributed import process
from training.distributed.ranks import SECONDS_FOR_ANOTHER_TO_REPORT, Ranks, is_lost_peer

_ROOT = Path(__file__).resolve().parents[2]
_SECONDS_BETWEEN_BEATS = 1.0
_SECONDS_TO_ANSWER = 10.0  # rank 0 may notice a silent rank as late as the others could notice a silent rank 0
_LONGEST = timedelta(days=365)  # for `stuck_minutes=null`; gloo accepts no infinity
# The status that a rank sends with a heartbeat; the highest of all is rank 0's answer.
_HERE, _DONE, _LEAVING, _LOST = range(4)


class Watchdog:
    """Watches all ranks within its `with` block, which they enter and leave together, in a process group."""

    def __init__(self, ranks: Ranks, stuck_minutes: float | None, name: Callable[[int], str] = str) -> None:
        """stuck_minutes: None for no limit. name: formats a rank in messages."""
        self._ranks, self._name = ranks, name
        self._seconds = math.inf if stuck_minutes is None else 60 * stuck_minutes
        self._named_timeout = f"stuck_minutes={stuck_minutes}"
        self._timeout = _LONGEST if stuck_minutes is None else timedelta(minutes=stuck_minutes)
        self._status, self._answer = _HERE, _HERE
        self._hurry, self._ended = threading.Event(), threading.Event()
        self._is_watched, self._last_progress = False, time.monotonic()
        self._listening = ExitStack()
        self._idle_others = math.inf  # on rank 0: seconds since any of them made progress
        self._main_thread = threading.get_ident()
        self._threads = [threading.Thread(target=self._watch_progress, daemon=True)]
        if ranks.world_size > 1:
            # Two groups: a wait that times out closes all connections of its group (gloo), and the other ranks still
            # need an answer.
            longest = self._timeout + timedelta(seconds=2 * _SECONDS_TO_ANSWER)
            self._to_main, self._from_main = (process.make_group_with_timeout(longest) for _ in range(2))
            self._threads.append(threading.Thread(target=self._exchange_beats, daemon=True))

    def __enter__(self) -> Watchdog:
        self._listening.enter_context(console.listen_to_progress(self._progress))
        self._progress()
        self._is_watched = True
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for the other ranks, however long; with an error, notify them that this one is about to leave."""
        self._is_watched = False
        self._listening.close()
        if not is_lost_peer(error):  # else the thread is about to find out who that was
            self._status = _DONE if error is None else _LEAVING
        self._hurry.set()
        for thread in self._threads[1:]:
            thread.join(None if error is None else SECONDS_FOR_ANOTHER_TO_REPORT)
        self._ended.set()
        self._threads[0].join()

    @contextmanager
    def following(self, module: torch.nn.Module) -> Iterator[None]:
        """Within this context the forward passes of this rank's stage are progress."""
        hook = module.register_forward_hook(self._progress)
        try:
            yield
        finally:
            hook.remove()

    def limit_collectives(self) -> None:
        """Set a matching timeout on the process groups that have none of their own."""
        process.limit_collectives(2 * self._timeout + timedelta(seconds=3 * _SECONDS_TO_ANSWER))

    def leave(self) -> None:
        """Tell the other ranks that this one is about to leave, and wait until they know. Callable from any thread."""
        self._begin_to_leave()
        for thread in self._threads[1:]:
            if thread.is_alive():
                thread.join(2 * _SECONDS_BETWEEN_BEATS)

    def _begin_to_leave(self) -> None:
        self._status = _LEAVING
        self._hurry.set()

    def _progress(self, *_: object) -> None:
        self._last_progress = time.monotonic()

    @property
    def _idle(self) -> float:
        return time.monotonic() - self._last_progress

    def _exchange_beats(self) -> None:
        exchange = self._collect_beats if self._ranks.is_main else self._ask_main
        while self._answer == _HERE:
            self._hurry.wait(_SECONDS_BETWEEN_BEATS)
            if self._status == _HERE:
                self._hurry.clear()
            self._answer = exchange()
        if self._answer == _LOST:
            time.sleep(SECONDS_FOR_ANOTHER_TO_REPORT)
            os._exit(1)

    def _collect_beats(self) -> int:
        """On rank 0: receive the status of each rank, and answer those that sent one."""
        received, lost, idle = {0: self._status}, {}, [math.inf]
        for rank in range(1, self._ranks.world_size):
            try:
                received[rank], seconds = _receive(rank, self._to_main, self._timeout)
                idle.append(seconds)
            except RuntimeError as error:
                lost[rank] = error
        self._idle_others = min(idle)
        answer = max(received.values())
        if lost and answer != _LEAVING:
            answer = _LOST
        elif answer == _DONE and min(received.values()) == _HERE:
            answer = _HERE
        if answer == _LOST:
            self._report("; ".join(self._describe_lost(rank, error) for rank, error in lost.items()))
        for rank in received.keys() - {0}:
            with suppress(RuntimeError):
                dist.send(torch.tensor([answer, 0], dtype=torch.int32), dst=rank, group=self._from_main)
        if answer == _LOST:
            time.sleep(_SECONDS_BETWEEN_BEATS)  # a connection that closes with bytes unread drops what was sent
            os._exit(1)
        return answer

    def _ask_main(self) -> int:
        try:
            beat = torch.tensor([self._status, round(self._idle)], dtype=torch.int32)
            dist.send(beat, dst=0, group=self._to_main)
            return _receive(0, self._from_main, self._timeout + timedelta(seconds=_SECONDS_TO_ANSWER))[0]
        except RuntimeError as error:
            if self._ranks.rank == 1:  # one report is enough
                self._report(self._describe_lost(0, error))
                os._exit(1)
            return _LOST

    def _watch_progress(self) -> None:
        while not self._ended.wait(min(1.0, self._seconds / 10)):
            if not self._is_watched or self._idle < self._seconds:
                continue
            place, waits = find_place(sys._current_frames()[self._main_thread])
            if waits and (self._lets_others_report() or not self._ranks.is_main):
                continue
            if (log := sys.stdout or sys.__stderr__) is not None:  # the rank's log
                faulthandler.dump_traceback(log)
            known = (
                "it waits for another rank, or for its GPU, and none has reported itself"
                if waits
                else "the other ranks wait for it"
            )
            self._begin_to_leave()
            self._report(
                f"rank {self._name(self._ranks.rank)} has made no progress for {self._named_timeout}: it is at {place}"
                f"; {known}"
            )
            self.leave()
            os._exit(1)

    def _lets_others_report(self) -> bool:
        """Returns whether a rank that waits for another gives it more time: it makes progress, or may report itself."""
        longest = self._seconds + max(self._seconds / 4, _SECONDS_TO_ANSWER)
        return min(self._idle, self._idle_others) < longest

    def _describe_lost(self, rank: int, error: RuntimeError) -> str:
        if is_lost_peer(error):
            return f"rank {self._name(rank)} has ended without a message: it was killed, or its host ran out of memory"
        return (
            f"rank {self._name(rank)} has not answered for {self._named_timeout}: it is stopped or stuck, or its host "
            "is gone"
        )

    def _report(self, text: str) -> None:
        console.say_last(f"\nerror: {text}; continue with resume=auto\n")


def _receive(source: int, group: dist.ProcessGroup, timeout: timedelta) -> tuple[int, int]:
    """Return the status that a rank sends, and the seconds since it made progress."""
    beat = torch.zeros(2, dtype=torch.int32)
    work = dist.irecv(beat, src=source, group=group)
    assert work is not None  # None only outside the group
    work.wait(timeout)
    status, seconds = beat.tolist()
    return status, seconds


def find_place(frame: FrameType | None) -> tuple[str, bool]:
    """Return the innermost line of this project in a stack, and whether it waits there for another rank: in `wait_for`,
    or in torch's or DeepSpeed's communication.

    On a GPU the host may wait for it, and so for another rank, in any line that reads a tensor's content; `data/` has
    no such lines.
    """
    waits, on_gpu = False, dist.is_initialized() and dist.get_backend() != "gloo"
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(_ROOT) and "site-packages" not in file.parts:
            place = file.relative_to(_ROOT)
            waits |= frame.f_code is wait_for.__code__ or (on_gpu and place.parts[0] != "data")
            return f"{place}:{frame.f_lineno} ({frame.f_code.co_name})", waits
        parts = file.parts[-4:]
        waits |= "distributed" in parts or ("deepspeed" in file.parts and (on_gpu or "comm" in parts))
        frame = frame.f_back
    return "an unknown place", waits
