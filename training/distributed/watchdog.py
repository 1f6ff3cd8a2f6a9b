"""Finds a rank that is dead or stuck, names it and ends the run. Otherwise the others would wait for it in a
collective, silently.

*Dead or stopped.* A thread of each rank sends rank 0 a heartbeat once a second, and rank 0 answers, over separate gloo
groups. A connection that closes without notice means that the rank was killed; a rank that sends nothing for
`stuck_minutes` is stopped, or its host is gone. Nothing that the main threads wait for delays this.

*Stuck.* A rank that has made no progress for `stuck_minutes`, neither by a forward pass nor in anything that has a bar
(weights loaded, files checked, bytes saved or exported) nor by waiting for a disk to flush a file, inspects its main
thread's stack. In a collective it waits for another rank, and gives that one a quarter of the time more to report
itself; anywhere else it is the stuck one, and names the line. With NCCL the host waits for the GPU anywhere in the
engine, so there the first rank reports what it knows, once no rank makes progress. Before a rank reports, all of them
write down their stacks and torch's flight recorder, and rank 0 compares which operations each has begun
(`flight_recorder.py`): the report names the one in which ranks wait, and the ranks that lack it.

*The others end too.* With gloo a collective fails when a rank has ended; with NCCL it never returns. So a rank that
learns of an end leaves by itself some seconds later, within `grace_seconds`, a save that is under way finished.

The last resort is the timeout of the process groups themselves, over twice as long: for a C call that never returns to
the interpreter.
"""

from __future__ import annotations

import faulthandler
import json
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist

import console
from errors import Ending
from filesystem import find_flushed
from models.parallel.exchanges import wait_for
from training.distributed import flight_recorder, process
from training.distributed.ending import record_end
from training.distributed.leaving import exit_after_save
from training.distributed.ranks import SECONDS_FOR_ANOTHER_TO_REPORT, Ranks, is_lost_peer, names_lost_peer

_ROOT = Path(__file__).resolve().parents[2]
_SECONDS_BETWEEN_BEATS = 1.0
SECONDS_FOR_ANOTHER_TO_END = 20.0  # by itself, once a rank has: more than SECONDS_FOR_ANOTHER_TO_REPORT
_SECONDS_TO_ANSWER = 10.0  # rank 0 may notice a silent rank as late as the others could notice a silent rank 0
_LONGEST = timedelta(days=365)  # for `stuck_minutes=null`; gloo accepts no infinity
# The status that a rank sends with a heartbeat; the highest of all is rank 0's answer.
_HERE, _DONE, _STUCK, _LEAVING, _LOST = range(5)


class Watchdog:
    """Watches all ranks within its `with` block, which they enter and leave together, in a process group."""

    def __init__(
        self,
        ranks: Ranks,
        stuck_minutes: float | None,
        name: Callable[[int], str] = str,
        *,
        grace_seconds: float = SECONDS_FOR_ANOTHER_TO_END,
        logs: Path | None = None,
    ) -> None:
        """stuck_minutes: None for no limit. name: formats a rank in messages. grace_seconds: in which this rank ends
        after another one has. logs: the folder for what was recorded; None to omit it."""
        self._ranks, self._name, self._logs = ranks, name, logs
        self._seconds = math.inf if stuck_minutes is None else 60 * stuck_minutes
        self._seconds_to_end = min(grace_seconds, SECONDS_FOR_ANOTHER_TO_END)
        self._named_timeout = f"stuck_minutes={stuck_minutes}"
        self._timeout = _LONGEST if stuck_minutes is None else timedelta(minutes=stuck_minutes)
        self._status, self._answer = _HERE, _HERE
        self._hurry, self._left, self._ended = (threading.Event() for _ in range(3))
        self._is_watched, self._last_progress = False, time.monotonic()
        self._listening = ExitStack()
        self._idle_others = math.inf  # on rank 0: seconds since any of them made progress
        self._waits: flight_recorder.Waits | None = None  # of this rank, once a rank is stuck
        self._compared, self._described = threading.Event(), ""  # what all of them wait in
        self._writing = threading.Thread(target=self._write_down, daemon=True)
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
        self._left.set()
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
        while self._answer in (_HERE, _STUCK):
            self._hurry.wait(_SECONDS_BETWEEN_BEATS if self._answer == _HERE else _SECONDS_BETWEEN_BEATS / 10)
            if self._status == _HERE:
                self._hurry.clear()
            self._answer, told = exchange()
            if self._answer == _STUCK:
                self._compare_waits(told)
            elif self._answer in (_LEAVING, _LOST):
                self._report_end(**told)
        if self._answer == _LOST:
            # a connection that closes with bytes unread drops what was sent
            time.sleep(_SECONDS_BETWEEN_BEATS if self._ranks.is_main else SECONDS_FOR_ANOTHER_TO_REPORT)
            exit_after_save(Ending.LOST_RANK, self._may_save)
        if self._answer == _LEAVING and not self._left.wait(self._seconds_to_end):
            exit_after_save(Ending.LOST_RANK, self._may_save)

    def _collect_beats(self) -> tuple[int, Any]:
        """On rank 0: receive the status of each rank, and answer those that sent one. Returns the answer, and what goes
        with it."""
        statuses, waits, lost, idle = {0: self._status}, {0: self._waits}, {}, [math.inf]
        for rank in range(1, self._ranks.world_size):
            try:
                (statuses[rank], seconds), found = _receive(rank, self._to_main, self._timeout)
                waits[rank] = None if found is None else flight_recorder.read_waits(found)
                idle.append(seconds)
            except RuntimeError as error:
                lost[rank] = error
        self._idle_others = min(idle)
        answer = max(statuses.values())
        if lost and answer != _LEAVING:
            answer = _LOST
        elif answer == _DONE and min(statuses.values()) == _HERE:
            answer = _HERE
        told: Any = None
        if answer == _LOST:
            told = {"lost": [(rank, names_lost_peer(error)) for rank, error in lost.items()]}
        elif answer == _LEAVING:
            told = {"leaving": next(rank for rank, status in statuses.items() if status == _LEAVING)}
        elif answer == _STUCK and len(known := {rank: each for rank, each in waits.items() if each}) == len(waits):
            told = flight_recorder.describe_waits(known, self._name)
        for rank in statuses.keys() - {0}:
            with suppress(RuntimeError):
                _send((answer, 0), told, rank, self._from_main)
        return answer, told

    def _ask_main(self) -> tuple[int, Any]:
        try:
            _send((self._status, round(self._idle)), self._waits, 0, self._to_main)
            (answer, _), told = _receive(0, self._from_main, self._timeout + timedelta(seconds=_SECONDS_TO_ANSWER))
            return answer, told
        except RuntimeError as error:
            was_killed = names_lost_peer(error)
            if self._ranks.rank == 1 and self._ranks.local_rank > 0:  # in place of rank 0 of its host
                self._report(self._describe_lost(0, was_killed))
            return _LOST, {"lost": [(0, was_killed)]}

    def _compare_waits(self, described: str | None) -> None:
        """Write down what this rank does and has begun with others, once, and give it to rank 0 to compare; keep what
        rank 0 has found (`described`; None until it has heard from all)."""
        if self._waits is None:
            self._traces = flight_recorder.read_traces()
            self._waits = flight_recorder.find_waits(self._traces, flight_recorder.list_groups())
            self._writing.start()  # the disk may be what is stuck
        elif described is not None:
            self._described = described
            self._compared.set()

    def _write_down(self) -> None:
        """Write all threads' stacks to this rank's log, and torch's flight recorder next to it."""
        log = sys.stdout or sys.__stderr__
        with suppress(OSError):
            if log is not None:
                faulthandler.dump_traceback(log)
            if self._traces and self._logs is not None:
                file = self._logs / f"flight_recorder_{self._ranks.rank}.json"
                file.write_text(json.dumps(self._traces))

    def _report_end(self, lost: Sequence[tuple[int, bool]] = (), leaving: int = 0) -> None:
        """Report the end of other ranks, once on each host. lost: each with whether it was killed. leaving: one that
        reports itself on its own host."""
        if self._ranks.local_rank > 0 or self._status == _LEAVING:
            return
        if lost:
            self._report("; ".join(self._describe_lost(rank, was_killed) for rank, was_killed in lost))
        elif leaving // self._ranks.local_size != self._ranks.rank // self._ranks.local_size:
            self._report(f"rank {self._name(leaving)} has ended; the screen of its host and its log say why", False)

    def _may_save(self) -> bool:
        """Returns whether a save that is under way gets on."""
        return self._idle < self._seconds

    def _watch_progress(self) -> None:
        while not self._ended.wait(min(1.0, self._seconds / 10)):
            if not self._is_watched or self._idle < self._seconds:
                continue
            if (flushed := find_flushed(sys._current_frames().values())) is not None:
                self._report_slow_disk(*flushed)
                self._progress()
                continue
            place, waits = find_place(sys._current_frames()[self._main_thread])
            if waits and (self._lets_others_report() or not self._ranks.is_main):
                continue
            self._status = _STUCK
            self._hurry.set()
            if self._ranks.world_size > 1:
                self._compared.wait(_SECONDS_TO_ANSWER)
            self._compare_waits(None)  # unless it is done
            known = (
                "it waits for another rank, or for its GPU, and none has reported itself"
                if waits
                else "the other ranks wait for it"
            )
            described = self._described if flight_recorder.exists() else flight_recorder.MISSING
            self._begin_to_leave()
            self._report(
                f"rank {self._name(self._ranks.rank)} has made no progress for {self._named_timeout}: it is at {place}"
                f"{_describe_task()}; {known}{described and f': {described}'}"
            )
            self.leave()
            self._writing.join(_SECONDS_BETWEEN_BEATS)
            exit_after_save(Ending.LOST_RANK, self._may_save)

    def _report_slow_disk(self, file: Path, num_bytes: int) -> None:
        """A rank that was ended for a slow disk would begin the same save again, so that is progress."""
        console.say(
            f"warning: rank {self._name(self._ranks.rank)} has waited for the disk for {self._named_timeout}: "
            f"{num_bytes:,} bytes of {file} are being flushed{_describe_task()}"
        )

    def _lets_others_report(self) -> bool:
        """Returns whether a rank that waits for another gives it more time: it makes progress, or may report itself."""
        longest = self._seconds + max(self._seconds / 4, _SECONDS_TO_ANSWER)
        return min(self._idle, self._idle_others) < longest

    def _describe_lost(self, rank: int, was_killed: bool) -> str:
        if was_killed:
            return f"rank {self._name(rank)} has ended without a message: it was killed, or its host ran out of memory"
        return (
            f"rank {self._name(rank)} has not answered for {self._named_timeout}: it is stopped or stuck, or its host "
            "is gone"
        )

    def _report(self, text: str, is_first: bool = True) -> None:
        """Report why this rank ends. is_first: whether no other rank has recorded it."""
        console.say_last(f"\nerror: {text}; continue with resume=auto\n")
        if is_first:
            record_end(Ending.LOST_RANK, text)


def _send(numbers: tuple[int, int], attached: Any, rank: int, group: dist.ProcessGroup) -> None:
    """Send two numbers and, where it is not None, an object that JSON can hold."""
    content = b"" if attached is None else json.dumps(attached).encode()
    dist.send(torch.tensor([*numbers, len(content)], dtype=torch.int32), dst=rank, group=group)
    if content:
        dist.send(torch.frombuffer(bytearray(content), dtype=torch.uint8), dst=rank, group=group)


def _receive(source: int, group: dist.ProcessGroup, timeout: timedelta) -> tuple[tuple[int, int], Any]:
    """Return the two numbers that a rank sends, such as its status and the seconds since it made progress, and the
    object with them; None without one."""
    *numbers, num_bytes = _receive_tensor(torch.zeros(3, dtype=torch.int32), source, group, timeout).tolist()
    if num_bytes == 0:
        return tuple(numbers), None
    content = _receive_tensor(torch.zeros(num_bytes, dtype=torch.uint8), source, group, timeout)
    return tuple(numbers), json.loads(bytes(content.tolist()))


def _receive_tensor(tensor: torch.Tensor, source: int, group: dist.ProcessGroup, timeout: timedelta) -> torch.Tensor:
    work = dist.irecv(tensor, src=source, group=group)
    assert work is not None  # None only outside the group
    work.wait(timeout)
    return tensor


def _describe_task() -> str:
    task = console.describe_progress()
    return f" ({task})" if task else ""


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
