"""Transfers between two ranks that do not block: one-way links, each with a process group of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist

SENDS_IN_FLIGHT = 2  # to another rank: with one, even stages never wait for it; with two, nor does an uneven moment


def wait_for(works: Sequence[dist.Work]) -> None:
    """All waiting for other ranks is done here: so the watchdog distinguishes a rank that waits from one that is
    stuck.
    """
    for work in works:
        work.wait()


class Link:
    """One-way traffic with one other rank."""

    def __init__(self, group: dist.ProcessGroup, peer: int) -> None:
        self._group, self._peer = group, peer
        self._sent: deque[tuple[list[dist.Work], Sequence[torch.Tensor]]] = deque()

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        """The tensors are kept, and must not be written to, until they have been received."""
        while len(self._sent) >= SENDS_IN_FLIGHT:
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
