"""The messages between stages: activations from rank r to r + 1 and gradients back, around a ring, since the chunk
after the last rank's is the first rank's.

Which messages cross between which passes is planned (`training/pipeline/exchanges.py`). All of one exchange are
launched as one group, on a communicator that carries nothing else. Both ranks of a message have it in the same order
among those between them, so no tag is needed. Positions and segments are sent to a rank once: it keeps them for its
later chunks.

A message is one tensor, its hidden states and integers end to end: NCCL would send the second of several to a rank only
once it has also received what the group receives from that rank, which may need what is sent.

tests/training/engine/test_simulated_nccl.py runs this code for all ranks of many schedules against a model of NCCL.

P stages, V chunks per stage, M micro-batches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from models.parallel.exchanges import wait_for
from training.distributed.p2p import build_options
from training.distributed.process import make_host_group
from training.pipeline.exchanges import Exchange, Message, find_sender, is_local
from training.pipeline.schedule import Schedule

Tensors = tuple[torch.Tensor, ...]

# Exchanges under way before a rank waits for the first: what they send stays in memory until then
UNDER_WAY = 2


class Arrival(NamedTuple):
    """A message: its tensors, and what to wait for before they are read."""

    tensors: Tensors
    works: Sequence[dist.Work]


Shapes = Sequence[tuple[torch.Size, torch.dtype]]
_ALIGNMENT = 8  # bytes: of the widest integers


def join(tensors: Tensors) -> torch.Tensor:
    """Return tensors as one that is sent: the only one, else a copy of all their bytes."""
    if len(tensors) == 1:
        return tensors[0]
    shapes = [(tensor.shape, tensor.dtype) for tensor in tensors]
    joined = allocate_joined(shapes, tensors[0].device)
    for view, tensor in zip(_view_parts(joined, shapes), tensors):
        view.copy_(tensor)
    return joined


def allocate_joined(shapes: Shapes, device: torch.device) -> torch.Tensor:
    """Return an empty tensor for what `join` makes of tensors of these shapes."""
    if len(shapes) == 1:
        return torch.empty(shapes[0][0], dtype=shapes[0][1], device=device)
    return torch.empty(sum(_count_bytes(*shape, _ALIGNMENT) for shape in shapes), dtype=torch.uint8, device=device)


def separate(joined: torch.Tensor, shapes: Shapes) -> Tensors:
    """Return the tensors that were joined: a view of the first, and copies of the others, which may outlive it."""
    if len(shapes) == 1:
        return (joined,)
    first, *others = _view_parts(joined, shapes)
    return first, *(each.clone() for each in others)


def _view_parts(joined: torch.Tensor, shapes: Shapes) -> Iterator[torch.Tensor]:
    start = 0
    for shape, dtype in shapes:
        yield joined[start : start + _count_bytes(shape, dtype)].view(dtype).view(shape)
        start += _count_bytes(shape, dtype, _ALIGNMENT)


def _count_bytes(shape: torch.Size, dtype: torch.dtype, multiple: int = 1) -> int:
    """multiple: what the number is rounded up to."""
    return -(-shape.numel() * dtype.itemsize // multiple) * multiple


class Transfers:
    """The messages of one rank. After `forget_shapes` their shapes are unknown; a rank learns them from the one before
    it, and the first rank from its own outputs."""

    def __init__(self, schedule: Schedule, rings: Sequence[Sequence[int]], rank: int, device: torch.device) -> None:
        """Connect the ranks of each pipeline. rings: their ranks, by stage. All ranks call it."""
        self._schedule, self._device = schedule, device
        self._ring = next(ring for ring in rings if rank in ring)
        self._stage_id = self._ring.index(rank)
        self._group, _ = dist.new_subgroups_by_enumeration(rings, pg_options=build_options(dist.get_backend()))
        self._host_group = make_host_group()
        self._connect()
        self._arrivals: dict[Message, Arrival] = {}
        self._under_way: deque[Arrival] = deque()  # what was sent
        self._integers: dict[int, Tensors] = {}  # of each micro-batch that this rank will see again
        self.forget_shapes()

    def _connect(self) -> None:
        """Send and receive an element across every boundary of this rank, in both directions, in one group.

        NCCL makes a communicator at the first call of all its ranks. It connects two of them for messages in one
        direction when both first launch a group with one, and until then neither group's kernel is launched: in the
        first step a rank that sends an activation and receives the first gradient would hold the activation back until
        the other has made the gradient, though that may wait for the activation.
        """
        dist.all_reduce(torch.zeros(1, device=self._device), group=self._group)
        operations = []
        for _, start, stop in self._schedule.list_links():
            if self._stage_id in (start, stop):
                operation, peer = (dist.isend, stop) if self._stage_id == start else (dist.irecv, start)
                element = torch.zeros(1, device=self._device)
                operations.append(dist.P2POp(operation, element, self._ring[peer], self._group))
        wait_for(dist.batch_isend_irecv(operations) if operations else ())

    def forget_shapes(self) -> None:
        """The next messages may have other shapes; all ranks call it at the same time."""
        self._shapes: Shapes | None = None  # of the tensors that cross every boundary
        self._is_told = self._stage_id == self._schedule.num_stages - 1  # the next stage, or there is none to tell

    def hand_over(self, message: Message, tensors: Tensors) -> None:
        """Pass a message on to a later pass of this rank."""
        self._arrivals[message] = Arrival(tuple(tensor.detach() for tensor in tensors), ())

    def exchange(self, planned: Exchange, result: Tensors) -> None:
        """Start an exchange. result: of the pass before it, (hidden states, integers, ...) or (gradient,). Every
        boundary is crossed by the same shapes."""
        if planned.sent is None and not planned.received:
            return
        sent = [] if planned.sent is None else [join(self._select(planned.sent, result))]
        received = [allocate_joined(self._list_shapes(message), self._device) for message in planned.received]
        self._bound_sent()
        operations = []
        for joined in sent:
            assert planned.sent is not None
            peer = self._ring[self._schedule.find_stage(planned.sent.chunk)]
            operations.append(dist.P2POp(dist.isend, joined, peer, self._group))
        for message, joined in zip(planned.received, received, strict=True):
            peer = self._ring[find_sender(self._schedule, message)]
            operations.append(dist.P2POp(dist.irecv, joined, peer, self._group))
        works = dist.batch_isend_irecv(operations)
        if len(works) < len(operations):  # NCCL's: one work for the group
            works *= len(operations)
        for joined in sent:
            self._under_way.append(Arrival((joined,), works[:1]))
        for message, joined, work in zip(planned.received, received, works[len(sent) :], strict=True):
            self._arrivals[message] = Arrival((joined,), [work])

    def _drop_received(self) -> None:
        """Free what was sent and has been received."""
        while self._under_way and all(work.is_completed() for work in self._under_way[0].works):
            wait_for(self._under_way.popleft().works)

    def _bound_sent(self) -> None:
        """Wait for the oldest where too much is under way."""
        self._drop_received()
        while len(self._under_way) >= UNDER_WAY:
            wait_for(self._under_way.popleft().works)

    def take(self, message: Message) -> Tensors:
        """Return a message: (hidden states, integers, ...) or (gradient,). Waits for it: the host with gloo, the stream
        with NCCL."""
        tensors, works = self._arrivals.pop(message)
        wait_for(works)
        self._drop_received()
        if is_local(self._schedule, message):
            return tensors
        tensors = separate(tensors[0], self._list_shapes(message))
        if message.is_gradient or self._is_first(message.chunk):
            return tensors
        is_last = message.chunk == self._schedule.list_chunks(self._stage_id)[-1]
        kept = self._integers.pop(message.micro_batch) if is_last else self._integers[message.micro_batch]
        return (*tensors, *kept)

    def finish(self) -> None:
        """Wait until all that was sent has been received."""
        while self._under_way:
            wait_for(self._under_way.popleft().works)

    def _select(self, message: Message, result: Tensors) -> Tensors:
        """Return what the receiver lacks of a result, and keep its integers for this rank's later chunks."""
        result = tuple(tensor.detach() for tensor in result)  # not the graph that made them
        if message.is_gradient:
            return result
        shapes = [(tensor.shape, tensor.dtype) for tensor in result]
        self._shapes = self._shapes or shapes
        assert shapes == self._shapes, "the same shapes cross every boundary of a step"
        if not self._is_told:
            self._send_shapes()
        hidden_states, *integers = result
        if self._is_first(message.chunk - 1) and self._schedule.num_chunks > 1:
            self._integers[message.micro_batch] = tuple(integers)
        return result if self._is_first(message.chunk) else (hidden_states,)

    def _list_shapes(self, message: Message) -> Shapes:
        """Those of the tensors of a message that this rank receives."""
        if self._shapes is None:
            self._shapes = self._receive_shapes()
        has_integers = not message.is_gradient and self._is_first(message.chunk)
        return [(shape, dtype) for shape, dtype in self._shapes if has_integers or dtype.is_floating_point]

    def _is_first(self, chunk: int) -> bool:
        return self._schedule.is_first_of_rank(chunk)

    def _send_shapes(self) -> None:
        """Through the hosts: the next rank would have to read them from its device, and wait for it."""
        dist.send_object_list([self._shapes], self._ring[self._stage_id + 1], self._host_group)
        self._is_told = True

    def _receive_shapes(self) -> Shapes:
        received: list[Shapes] = [[]]
        dist.recv_object_list(received, self._ring[self._stage_id - 1], self._host_group)
        return received[0]
