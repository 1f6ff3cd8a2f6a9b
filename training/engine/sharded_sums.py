"""ZeRO-2 under any schedule: each replica has its part of the sums of gradients, in fp32, and never all of them.

A stage's trained parameters lie end to end, group by group, and each group is cut into equal parts, one a replica
(`DeepSpeedZeroOptimizer`). While a backward pass runs, its gradients go into buckets; a full one is reduced to the
ranks whose parts its elements lie in, added there, and freed. DeepSpeed's engine for pipelines knows no such sums
(deepspeed 0.19.8), so it runs as of stage 1, and its optimizer finds this rank's part where a stage 2 of its own would
have left it.

Which buckets a pass has follows from its layers, and they are reduced in one order: all replicas run the same
collectives, although an expert may have got no token on some of them. What has no gradient when a pass ends counts as
zero. The gradient of a weight that two stages share is summed over both of them before it is cut, so all of it is kept
until then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from deepspeed.runtime.zero.stage_1_and_2 import GradPartitionBufferGroup

from training.engine.shard_groups import average
from training.optim.gradient_sums import add_gradient

Parameter = torch.nn.Parameter


class Place(NamedTuple):
    """The first element of a parameter: which group, and where in it, end to end."""

    group: int
    start: int


class Piece(NamedTuple):
    """Elements `first` to `first + length` of a flattened parameter."""

    parameter: Parameter
    first: int
    length: int


@dataclass
class ReduceSlice:
    """What one rank gets of a bucket: pieces, end to end, and where they lie in its parts: (group, start, length)."""

    owner: int
    pieces: list[Piece] = field(default_factory=list)
    runs: list[tuple[int, int, int]] = field(default_factory=list)

    def append(self, piece: Piece, group: int, start: int) -> None:
        self.pieces.append(piece)
        if self.runs and self.runs[-1][0] == group and sum(self.runs[-1][1:]) == start:
            _, first, length = self.runs.pop()
            self.runs.append((group, first, length + piece.length))
        else:
            self.runs.append((group, start, piece.length))


@dataclass(frozen=True)
class Bucket:
    parameters: tuple[Parameter, ...]
    shipments: tuple[ReduceSlice, ...]


def plan_buckets(
    parameters: Iterable[Parameter], places: Mapping[int, Place], part_sizes: Sequence[int], limit: int
) -> list[Bucket]:
    """Buckets of up to `limit` elements, or of one larger parameter, in the order in which a backward pass fills them.

    parameters: in the order of a forward pass. places: by the id of a parameter. part_sizes: of each group.
    """
    filled: list[list[Parameter]] = []
    room = 0
    for parameter in reversed(list(parameters)):
        if parameter.numel() > room:
            filled.append([])
            room = limit
        filled[-1].append(parameter)
        room -= parameter.numel()
    return [Bucket(tuple(bucket), tuple(_list_shipments(bucket, places, part_sizes))) for bucket in filled]


def _list_shipments(
    bucket: Sequence[Parameter], places: Mapping[int, Place], part_sizes: Sequence[int]
) -> Iterable[ReduceSlice]:
    shipments: dict[int, ReduceSlice] = {}
    for parameter in sorted(bucket, key=lambda each: places[id(each)]):
        group, start = places[id(parameter)]
        first = 0
        while first < parameter.numel():
            owner, offset = divmod(start + first, part_sizes[group])
            length = min(parameter.numel() - first, part_sizes[group] - offset)
            shipment = shipments.setdefault(owner, ReduceSlice(owner))
            shipment.append(Piece(parameter, first, length), group, offset)
            first += length
    return shipments.values()


Sent = tuple[ReduceSlice, torch.Tensor, dist.Work | None]  # its elements; what to wait for


class ShardedSums:
    """The sums of a step. Each pass is announced by `start_pass`, and ends with `finish_pass`; `finish_step` leaves the
    sums to the optimizer."""

    def __init__(
        self,
        optimizer: Any,
        passes: Mapping[Any, Sequence[Parameter]],
        kept_whole: Iterable[Parameter],
        reduce_dtype: torch.dtype,
        replicas: dist.ProcessGroup | None = None,
    ) -> None:
        """optimizer: DeepSpeed's `DeepSpeedZeroOptimizer`, of stage 1 and without buckets. passes: the parameters that
        may get a gradient in each kind of pass, in the order of a forward pass. kept_whole: those that stages share.
        replicas: ranks of other groups that have the same part, where the optimizer's group is not all replicas.
        """
        self._optimizer, self._reduce_dtype = optimizer, reduce_dtype
        self._group, self._replicas = optimizer.dp_process_group, replicas
        self._rank, self._size = dist.get_rank(self._group), dist.get_world_size(self._group)
        self._part_sizes = [int(size) for size in optimizer.partition_size]
        places = _locate(optimizer.bit16_groups)
        self._places = places
        self._kept_whole = [each for each in kept_whole if id(each) in places]
        whole = {id(parameter) for parameter in self._kept_whole}

        def plan(parameters: Iterable[Parameter]) -> list[Bucket]:
            return plan_buckets(parameters, places, self._part_sizes, optimizer.reduce_bucket_size)

        self._buckets = {
            kind: plan(each for each in parameters if id(each) in places and id(each) not in whole)
            for kind, parameters in passes.items()
        }
        self._last_buckets = plan(self._kept_whole)
        self._whole = whole
        self.parts: list[torch.Tensor] = []
        self._waiting: list[Bucket] = []  # of the running pass, not yet reduced; the next one last
        self._missing: set[int] = set()  # ids of the parameters of the next one that have no gradient yet
        self._sent: list[Sent] = []  # of the bucket that is on its way
        for parameter in (parameter for group in optimizer.bit16_groups for parameter in group):
            parameter.register_post_accumulate_grad_hook(self.add)

    def start_pass(self, kind: Any) -> None:
        if not self.parts:
            device = self._optimizer.bit16_groups_flat[0].device
            self.parts = [torch.zeros(size, dtype=torch.float32, device=device) for size in self._part_sizes]
        self._waiting = self._buckets[kind][::-1]
        self._look_at_next()

    @torch.no_grad()
    def add(self, parameter: Parameter) -> None:
        """Takes the gradient that a parameter has got."""
        if id(parameter) in self._whole:
            parameter.grad_accum = add_gradient(parameter, parameter.grad_accum)  # type: ignore[attr-defined]
        self._missing.discard(id(parameter))
        while self._waiting and not self._missing:
            self._reduce(self._waiting.pop())
            self._look_at_next()

    def _look_at_next(self) -> None:
        bucket = self._waiting[-1].parameters if self._waiting else ()
        self._missing = {id(parameter) for parameter in bucket if parameter.grad is None}

    @torch.no_grad()
    def finish_pass(self) -> None:
        """Reduces what is left, and waits until all has arrived."""
        while self._waiting:
            self._reduce(self._waiting.pop())
        self._settle()

    @torch.no_grad()
    def finish_step(self) -> None:
        """Once the stages that share weights have summed the gradients of those."""
        for parameter in self._kept_whole:
            parameter.grad, parameter.grad_accum = parameter.grad_accum, None  # type: ignore[attr-defined]
        for bucket in self._last_buckets:
            self._reduce(bucket)
        self._settle()
        if self._replicas is not None:
            for part in self.parts:
                average(part, self._replicas, self._reduce_dtype)
        for number, (part, parameters) in enumerate(zip(self.parts, self._optimizer.params_in_partition, strict=True)):
            views = [part.narrow(0, *self._find(parameter, number)) for parameter in parameters]
            self._optimizer.averaged_gradients[number] = GradPartitionBufferGroup(views, part)
        self.parts = []

    def _find(self, parameter: Parameter, group: int) -> tuple[int, int]:
        """Where this rank's part of a group has a parameter: (start, length)."""
        start = self._places[id(parameter)].start - self._rank * self._part_sizes[group]
        stop = min(start + parameter.numel(), self._part_sizes[group])
        return max(start, 0), stop - max(start, 0)

    def _reduce(self, bucket: Bucket) -> None:
        """Sends the gradients of a bucket on their way, and frees them. Those of the one before have arrived by then,
        while this one was filled."""
        self._settle()
        self._sent = [self._send(shipment) for shipment in bucket.shipments]
        for parameter in bucket.parameters:
            parameter.grad = None

    def _send(self, shipment: ReduceSlice) -> Sent:
        gradients = self._collect(shipment.pieces)
        work = None
        if self._size > 1:
            work = dist.reduce(gradients, group=self._group, group_dst=shipment.owner, async_op=True)
        return shipment, gradients, work

    def _collect(self, pieces: Sequence[Piece]) -> torch.Tensor:
        """End to end, in the dtype that they are sent in; what has no gradient is zero. Nothing is copied twice, and
        one piece that has the dtype not at all."""
        first = pieces[0].parameter
        if len(pieces) == 1 and first.grad is not None:
            return _flatten(pieces[0], first.grad).to(self._reduce_dtype)
        lengths = [piece.length for piece in pieces]
        gradients = torch.empty(sum(lengths), dtype=self._reduce_dtype, device=first.device)
        for piece, place in zip(pieces, gradients.split(lengths), strict=True):
            gradient = piece.parameter.grad
            if gradient is None:
                place.zero_()
            else:
                place.copy_(_flatten(piece, gradient))
        return gradients

    def _settle(self) -> None:
        """Waits for what is on its way, and adds what this rank gets to its sums."""
        for shipment, gradients, work in self._sent:
            if work is not None:
                work.wait()
            if shipment.owner == self._rank:
                self._add(shipment, gradients)
        self._sent = []

    def _add(self, shipment: ReduceSlice, gradients: torch.Tensor) -> None:
        lengths = [length for _, _, length in shipment.runs]
        for (group, start, length), arrived in zip(shipment.runs, gradients.split(lengths), strict=True):
            self.parts[group].narrow(0, start, length).add_(arrived, alpha=1 / self._size)


def _flatten(piece: Piece, gradient: torch.Tensor) -> torch.Tensor:
    return gradient.reshape(-1).narrow(0, piece.first, piece.length)


def _locate(groups: Iterable[Iterable[Parameter]]) -> dict[int, Place]:
    places = {}
    for number, group in enumerate(groups):
        start = 0
        for parameter in group:
            places[id(parameter)] = Place(number, start)
            start += parameter.numel()
    return places
