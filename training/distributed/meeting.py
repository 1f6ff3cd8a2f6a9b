"""Until the ranks of several hosts have met in their process group, notices that one of them has ended.

A launcher ends its own ranks when one of them fails. Those of the other hosts would wait for it in the rendezvous, for
as long as another host may need to tokenize. So each rank keeps a connection of its own to the store of the rendezvous:
it counts a beat there every second, and leaves the reason when it ends (`record_end`), which the other hosts print.
They end with the same exit code. Rank 0 names the ranks that have not been heard of for `start_minutes`: not started,
killed, or their host is gone. From then on `watchdog.py` does all that.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import console
from errors import Ending, UserError
from training.distributed.ending import notify_of_end, record_end
from training.distributed.ranks import SECONDS_FOR_ANOTHER_TO_REPORT, Ranks

if TYPE_CHECKING:
    import torch.distributed as dist

_SECONDS_BETWEEN_BEATS = 1.0
_SECONDS_TO_TELL = 60.0  # the longest that a rank which ends waits until the others know why: the store may end with it
_LONGEST = timedelta(days=365)  # for `start_minutes=null`
_is_telling = threading.Event()  # set once this rank leaves its own reason
_BEATS, _ENDED, _KNOWN = "meeting/beats", "meeting/ended", "meeting/known"  # in the store; the last: ranks that know


def tell_other_hosts(ranks: Ranks) -> None:
    """From now on, tell the other hosts why this rank ends. Does nothing on one host, whose launcher ends all ranks."""
    if ranks.local_size < ranks.world_size:
        notify_of_end(partial(_tell, ranks))


def watch_meeting(ranks: Ranks, start_minutes: float | None) -> None:
    """Start a thread that ends this process when a rank of another host has ended, until this one has its process
    group. Does nothing on one host. start_minutes: None for no limit. Raises UserError on rank 0 where its port is in
    use."""
    from training.distributed import rendezvous  # not above: `--help` needs no torch

    if ranks.local_size == ranks.world_size:
        return
    if ranks.is_main:
        rendezvous.serve()
    threading.Thread(target=_Meeting(ranks, start_minutes).follow, daemon=True).start()


def _tell(ranks: Ranks, code: int, text: str) -> None:
    """Leave in the store why this rank ends, unless another one has, and wait until the others have read it."""
    _is_telling.set()
    with suppress(Exception):  # the reason may be that torch is missing, or that the store is gone
        import torch.distributed as dist

        from training.distributed import rendezvous

        if dist.is_initialized():
            return
        if ranks.is_main:
            with suppress(UserError):  # in use by the process group, which still waits for other ranks
                rendezvous.serve()
        store = rendezvous.connect(timedelta(seconds=_SECONDS_TO_TELL))
        first, *_ = json.loads(
            store.compare_set(_ENDED, "", json.dumps((ranks.rank, code, _describe_end(ranks, text))))
        )
        deadline = time.monotonic() + _SECONDS_TO_TELL if first == ranks.rank or ranks.is_main else 0
        while store.add(_KNOWN, 0) < ranks.world_size - 1 and time.monotonic() < deadline:
            time.sleep(_SECONDS_BETWEEN_BEATS)


def _describe_end(ranks: Ranks, text: str) -> str:
    return f"rank {ranks.rank} ({socket.gethostname()}) has ended: {text}"


def _describe_silence(silent: Sequence[int], named_limit: str) -> str:
    place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    return (
        f"rank {', '.join(map(str, silent))} has not been heard of at {place} for {named_limit}: it was not started, "
        "it was killed, or its host cannot be reached"
    )


class _Meeting:
    def __init__(self, ranks: Ranks, start_minutes: float | None) -> None:
        self._ranks, self._named_limit = ranks, f"start_minutes={start_minutes or 0:g}"
        self._limit = _LONGEST if start_minutes is None else timedelta(minutes=start_minutes)
        self._heard = dict.fromkeys(range(ranks.world_size), (0, time.monotonic()))  # rank -> beats, and since when

    def follow(self) -> None:
        """Returns once this rank has its process group."""
        import torch.distributed as dist

        from training.distributed import rendezvous

        try:
            store = rendezvous.connect(self._limit)
        except RuntimeError:
            self._end(0, Ending.LOST_RANK, _describe_silence([0], self._named_limit))
        try:
            while not dist.is_initialized():
                store.add(f"{_BEATS}/{self._ranks.rank}", 1)
                if self._ranks.is_main:
                    self._find_silent(store)
                if store.check([_ENDED]):
                    rank, code, text = json.loads(store.get(_ENDED))
                    if rank == self._ranks.rank:
                        return
                    store.add(_KNOWN, 1)
                    self._end(rank, code, text)
                time.sleep(_SECONDS_BETWEEN_BEATS)
        except RuntimeError:  # the store has ended
            if not (dist.is_initialized() or _is_telling.is_set()):
                self._end(0, Ending.LOST_RANK, "rank 0 has ended; the screen of its host and its log say why")

    def _find_silent(self, store: dist.Store) -> None:
        """On rank 0: end the run when some rank has not sent a beat for too long."""
        now = time.monotonic()
        for rank, (count, _) in self._heard.items():
            if (beats := store.add(f"{_BEATS}/{rank}", 0)) != count:
                self._heard[rank] = beats, now
        silent = [rank for rank, (_, since) in self._heard.items() if now - since > self._limit.total_seconds()]
        if silent:
            self._report(Ending.LOST_RANK, _describe_silence(silent, self._named_limit))
            os._exit(Ending.LOST_RANK)

    def _end(self, rank: int, code: int, text: str) -> NoReturn:
        """End this process because a rank has ended, which has reported itself on its own host. code: its exit code."""
        size = self._ranks.local_size
        if self._ranks.local_rank == 0 and rank // size != self._ranks.rank // size:
            self._report(code, text)
        else:
            time.sleep(SECONDS_FOR_ANOTHER_TO_REPORT)
        os._exit(code)

    def _report(self, code: int, text: str) -> None:
        console.say_last(f"\nerror: {text}\n")
        record_end(code, text)
