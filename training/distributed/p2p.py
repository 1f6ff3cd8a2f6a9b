"""Non-blocking transfers between two ranks: one-way links, each with a process group of its own."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

# Thread blocks of NCCL's kernel on a link. Each holds a multiprocessor from the time that a transfer is posted, a pass
# before it is needed, until both ends have reached it; four links may wait at once. By default NCCL uses as many as
# could saturate the widest connection (up to 32). Not measured: on an H100 two should carry some 40 GB/s of NVLink.
LINK_CTAS = 2
_CHOSEN_BY_USER = ("NCCL_MAX_CTAS", "NCCL_MIN_CTAS", "NCCL_MAX_P2P_NCHANNELS", "NCCL_MIN_P2P_NCHANNELS")


def wait_for(works: Sequence[dist.Work]) -> None:
    """Wait for transfers. All waiting for other ranks is done here, so that the watchdog can distinguish a rank that
    waits from one that is stuck."""
    for work in works:
        work.wait()


def build_link_options(backend: str) -> Any | None:
    """Return `pg_options` for the process group of one link. Each link needs its own: torch writes the group's name
    into them.

    None for other backends than NCCL, for an NCCL without these options, and where a user has set the number of
    channels in NCCL's environment.
    """
    if (
        backend != dist.Backend.NCCL
        or not dist.is_nccl_available()
        or any(name in os.environ for name in _CHOSEN_BY_USER)
    ):
        return None
    options = dist.ProcessGroupNCCL.Options()
    if not hasattr(options, "config"):
        return None
    options.config.min_ctas, options.config.max_ctas = 1, LINK_CTAS
    return options


class Link:
    """One-way traffic with one other rank."""

    def __init__(self, group: dist.ProcessGroup, peer: int, sends_in_flight: int | None = None) -> None:
        """sends_in_flight: with that many sends in flight, the next one waits for the first; None for no limit."""
        self._group, self._peer, self._sends_in_flight = group, peer, sends_in_flight
        self._sent: deque[tuple[list[dist.Work], Sequence[torch.Tensor]]] = deque()

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        """Start to send the tensors. They are kept, and must not be written to, until they have been received."""
        while self._sent and all(work.is_completed() for work in self._sent[0][0]):
            wait_for(self._sent.popleft()[0])
        while self._sends_in_flight is not None and len(self._sent) >= self._sends_in_flight:
            wait_for(self._sent.popleft()[0])
        kept = [tensor.detach() for tensor in tensors]  # not the graph that made them
        self._sent.append(([_under_way(dist.isend(tensor, self._peer, group=self._group)) for tensor in kept], kept))

    def receive(self, tensors: Sequence[torch.Tensor]) -> list[dist.Work]:
        """Start to receive into the tensors. Returns the work to wait for."""
        return [_under_way(dist.irecv(tensor, self._peer, group=self._group)) for tensor in tensors]

    def finish(self) -> None:
        """Wait until everything that was sent has been received."""
        while self._sent:
            wait_for(self._sent.popleft()[0])


def _under_way(work: dist.Work | None) -> dist.Work:
    assert work is not None  # None only outside the group
    return work
