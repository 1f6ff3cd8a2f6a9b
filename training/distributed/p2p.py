"""Transfers between two ranks that do not block: one-way links, each with a process group of its own."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

# Thread blocks of NCCL's kernel on a link. Each holds a multiprocessor from the time that a transfer is posted, a pass
# before it is needed, until both ends have come to it; four links may wait at once. By default NCCL takes as many as
# could fill the widest connection (up to 32). Not measured: on an H100 two should carry some 40 GB/s of NVLink.
LINK_CTAS = 2
_CHOSEN_BY_USER = ("NCCL_MAX_CTAS", "NCCL_MIN_CTAS", "NCCL_MAX_P2P_NCHANNELS", "NCCL_MIN_P2P_NCHANNELS")


def wait_for(works: Sequence[dist.Work]) -> None:
    """All waiting for other ranks is done here: so the watchdog distinguishes a rank that waits from one that is
    stuck.
    """
    for work in works:
        work.wait()


def build_link_options(backend: str) -> Any | None:
    """`pg_options` for the process group of one link, of its own for each: torch writes the group's name into them.

    None for another backend than NCCL, for an NCCL without these options, and where a user has set the number of
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
        """sends_in_flight: one more waits until the first of them has been received; None for any number."""
        self._group, self._peer, self._sends_in_flight = group, peer, sends_in_flight
        self._sent: deque[tuple[list[dist.Work], Sequence[torch.Tensor]]] = deque()

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        """The tensors are kept, and must not be written to, until they have been received."""
        while self._sent and all(work.is_completed() for work in self._sent[0][0]):
            wait_for(self._sent.popleft()[0])
        while self._sends_in_flight is not None and len(self._sent) >= self._sends_in_flight:
            wait_for(self._sent.popleft()[0])
        kept = [tensor.detach() for tensor in tensors]  # not the graph that made them
        self._sent.append(([_under_way(dist.isend(tensor, self._peer, group=self._group)) for tensor in kept], kept))

    def receive(self, tensors: Sequence[torch.Tensor]) -> list[dist.Work]:
        """Fills the tensors by the time that what is returned has been waited for."""
        return [_under_way(dist.irecv(tensor, self._peer, group=self._group)) for tensor in tensors]

    def finish(self) -> None:
        while self._sent:
            wait_for(self._sent.popleft()[0])


def _under_way(work: dist.Work | None) -> dist.Work:
    assert work is not None  # for who is in the group
    return work
