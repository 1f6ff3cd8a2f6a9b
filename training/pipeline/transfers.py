"""The messages between stages: activations from rank r to r + 1 and gradients back, around a ring, since the chunk
after the last rank's is the first rank's.

Which messages cross between which passes is planned (`training/pipeline/exchanges.py`). An exchange is launched as
groups: the first tensor of each message (hidden states or their gradient) in one, then its integers (positions,
segments) one by one in a group each. So a group is at most one send and one receive between two ranks, and both have
the same ones in it: what NCCL does with several operations in one direction (another order in each release) does not
matter. Their communicator carries nothing else, and both ranks of a message have it in the same order among those
between them, so no tag is needed. Integers are sent to a rank once: it keeps them for its later chunks.

tests/training/engine/test_simulated_nccl.py runs this code for all ranks of many schedules against a model of NCCL.

P stages, V chunks per stage, M micro-batches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from models.parallel.exchanges import wait_for
from training.distributed.p2p import build_options
from training.distributed.process import make_host_group
from training.pipeline.exchanges import Exchange, Message, find_sender, is_local
from training.pipeline.schedule import Schedule

Tensors = tuple[torch.Tensor, ...]
Operation = Callable[..., dist.Work | None]  # dist.isend or dist.irecv

# Exchanges under way before a rank waits for the first: what they send stays in memory until then
UNDER_WAY = 2


class Arrival(NamedTuple):
    """A message that was sent or is received."""

    tensors: Tensors
    works: list[dist.Work]  # to wait for before the tensors are read or freed


class Transfers:
    """The messages of one rank. After `forget_shapes` their shapes are unknown; a rank learns them from the one before
    it, and the first rank from its own outputs."""

    def __init__(self, schedule: Schedule, rings: Sequence[Sequence[int]], rank: int, device: torch.device) -> None:
        """Connect the ranks of each pipeline. rings: their ranks, by stage. All ranks call it."""
        self._schedule, self.device = schedule, device
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
        """Open the connections of every boundary of this rank, in both directions.

        NCCL makes a communicator at the first call of all its ranks, and connects two of them for messages in one
        direction when both launch the first such message. Both wait for each other there, so that is done before the
        first step.
        """
        dist.all_reduce(torch.zeros(1, device=self.device), group=self._group)
        peers = {other for pair in self._schedule.list_boundaries() if self._stage_id in pair for other in pair}
        messages = [
            (operation, Arrival((torch.zeros(1, device=self.device),), []), peer)
            for peer in sorted(peers - {self._stage_id})
            for operation in (dist.isend, dist.irecv)
        ]
        self._launch(messages, 0)
        for _, arrival, _ in messages:
            wait_for(arrival.works)

    def forget_shapes(self) -> None:
        """The next messages may have other shapes; all ranks call it at the same time."""
        self._shapes: list[tuple[torch.Size, torch.dtype]] | None = None  # of the tensors that cross every boundary
        self._is_told = self._stage_id == self._schedule.num_stages - 1  # the next stage, or there is none to tell

    def hand_over(self, message: Message, tensors: Tensors) -> None:
        """Pass a message on to a later pass of this rank."""
        self._arrivals[message] = Arrival(tuple(tensor.detach() for tensor in tensors), [])

    def exchange(self, planned: Exchange, result: Tensors) -> None:
        """Start an exchange. result: of the pass before it, (hidden states, integers, ...) or (gradient,). Every
        boundary is crossed by the same shapes."""
        messages: list[tuple[Operation, Arrival, int]] = []
        if planned.sent is not None:
            sent = Arrival(self._select(planned.sent, result), [])
            messages.append((dist.isend, sent, self._schedule.find_stage(planned.sent.chunk)))
        for message in planned.received:
            self._arrivals[message] = Arrival(self._allocate(message), [])
            messages.append((dist.irecv, self._arrivals[message], find_sender(self._schedule, message)))
        self._bound_sent()
        for place in range(max(len(arrival.tensors) for _, arrival, _ in messages)):
            self._launch(messages, place)
        if planned.sent is not None:
            self._under_way.append(sent)

    def _launch(self, messages: Sequence[tuple[Operation, Arrival, int]], place: int) -> None:
        """Launch the tensors in one place of messages as one group. messages: how each is launched, and the other
        stage."""
        held = [each for each in messages if place < len(each[1].tensors)]
        operations = [
            dist.P2POp(operation, arrival.tensors[place], self._ring[stage], self._group)
            for operation, arrival, stage in held
        ]
        works = dist.batch_isend_irecv(operations) if operations else []
        for number, (_, arrival, _) in enumerate(held):  # NCCL has one work for the group, gloo one per operation
            arrival.works.append(works[number] if len(works) == len(held) else works[0])

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
        if message.is_gradient or is_local(self._schedule, message) or self._is_first(message.chunk):
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

    def _allocate(self, message: Message) -> Tensors:
        if self._shapes is None:
            self._shapes = self._receive_shapes()
        has_integers = not message.is_gradient and self._is_first(message.chunk)
        return tuple(
            torch.empty(shape, dtype=dtype, device=self.device)
            for shape, dtype in self._shapes
            if has_integers or dtype.is_floating_point
        )

    def _is_first(self, chunk: int) -> bool:
        return self._schedule.is_first_of_rank(chunk)

    def _send_shapes(self) -> None:
        """Through the hosts: the next rank would have to read them from its device, and wait for it."""
        dist.send_object_list([self._shapes], self._ring[self._stage_id + 1], self._host_group)
        self._is_told = True

    def _receive_shapes(self) -> list[tuple[torch.Size, torch.dtype]]:
        received: list[list[tuple[torch.Size, torch.dtype]]] = [[]]
        dist.recv_object_list(received, self._ring[self._stage_id - 1], self._host_group)
        return received[0]
