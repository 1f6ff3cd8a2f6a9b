"""ZeRO-2 under any schedule: each replica holds its part of the accumulated gradients, in fp32, and never all of them.

A stage's trained parameters are concatenated group by group, and each group is split into equal parts, one per replica
(`DeepSpeedZeroOptimizer`). During a backward pass, gradients are collected in buckets; a full one is reduced to the
ranks that own its elements, added there, and freed. DeepSpeed's pipeline engine does not support this (deepspeed
0.19.8), so it runs as stage 1, and its optimizer finds this rank's part where DeepSpeed's own stage 2 would have left
it.

The buckets of a pass follow from its layers, and they are reduced in a fixed order: all replicas run the same
collectives, although an expert may have got no token on some of them. A parameter without a gradient when a pass ends
counts as zero. The gradient of a weight that two stages share is summed over both before it is split, so all of it is
kept until then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from deepspeed.runtime.zero.stage_1_and_2 import GradPartitionBufferGroup

from training.engine.shard_groups import ShardGroups, average
from training.optim.gradient_sums import GradientSums, Half, add_gradient
from training.pipeline.module import StageModule
from training.pipeline.weight_gradients import list_split

Parameter = torch.nn.Parameter


class GroupOffset(NamedTuple):
    """The position of a parameter's first element: its group, and the offset in the flattened group."""

    group: int
    start: int


class ParameterRange(NamedTuple):
    """Elements `first` to `first + length` of a flattened parameter."""

    parameter: Parameter
    first: int
    length: int


@dataclass
class ReduceSlice:
    """The part of a bucket that is reduced to one rank.

    owner: that rank, in the process group. ranges: what is sent, concatenated. runs: where it goes in the owner's
    parts, each as (group, start, length).
    """

    owner: int
    ranges: list[ParameterRange] = field(default_factory=list)
    runs: list[tuple[int, int, int]] = field(default_factory=list)

    def append(self, added: ParameterRange, group: int, start: int) -> None:
        """Add a range that goes to `start` of the owner's part of `group`; adjacent runs are merged."""
        self.ranges.append(added)
        if self.runs and self.runs[-1][0] == group and sum(self.runs[-1][1:]) == start:
            _, first, length = self.runs.pop()
            self.runs.append((group, first, length + added.length))
        else:
            self.runs.append((group, start, added.length))


@dataclass(frozen=True)
class Bucket:
    """Parameters whose gradients are reduced together, and the slices that go to each owner."""

    parameters: tuple[Parameter, ...]
    slices: tuple[ReduceSlice, ...]


def plan_buckets(
    parameters: Iterable[Parameter], offsets: Mapping[int, GroupOffset], part_sizes: Sequence[int], limit: int
) -> list[Bucket]:
    """Return buckets of up to `limit` elements, or of one larger parameter, in the order in which a backward pass fills
    them.

    parameters: in the order of a forward pass. offsets: by the id of a parameter. part_sizes: of each group, in
    elements.
    """
    filled: list[list[Parameter]] = []
    room = 0
    for parameter in reversed(list(parameters)):
        if parameter.numel() > room:
            filled.append([])
            room = limit
        filled[-1].append(parameter)
        room -= parameter.numel()
    return [Bucket(tuple(bucket), tuple(_list_slices(bucket, offsets, part_sizes))) for bucket in filled]


def _list_slices(
    bucket: Sequence[Parameter], offsets: Mapping[int, GroupOffset], part_sizes: Sequence[int]
) -> Iterable[ReduceSlice]:
    slices: dict[int, ReduceSlice] = {}
    for parameter in sorted(bucket, key=lambda each: offsets[id(each)]):
        group, start = offsets[id(parameter)]
        first = 0
        while first < parameter.numel():
            owner, in_part = divmod(start + first, part_sizes[group])
            length = min(parameter.numel() - first, part_sizes[group] - in_part)
            owned = slices.setdefault(owner, ReduceSlice(owner))
            owned.append(ParameterRange(parameter, first, length), group, in_part)
            first += length
    return slices.values()


Sent = tuple[ReduceSlice, torch.Tensor, dist.Work | None]  # its elements; the work to wait for


class ShardedSums(GradientSums):
    """This rank's part of the gradients accumulated in a step; `reduce` hands them to the optimizer."""

    def __init__(
        self, module: StageModule, optimizer: Any, reduce_dtype: torch.dtype, groups: ShardGroups | None = None
    ) -> None:
        """Plan the buckets of each kind of pass, and register `add` as a hook of every trained parameter.

        optimizer: DeepSpeed's `DeepSpeedZeroOptimizer`, of stage 1 and without buckets. groups: None where gradients
        are sharded over all replicas.
        """
        super().__init__(module, optimizer)
        self._reduce_dtype = reduce_dtype
        replicas = None if groups is None else groups.replicas
        self._group, self._replicas = optimizer.dp_process_group, replicas
        self._rank, self._size = dist.get_rank(self._group), dist.get_world_size(self._group)
        self._part_sizes = [int(size) for size in optimizer.partition_size]
        offsets = _locate(optimizer.bit16_groups)
        self._offsets = offsets
        self._kept_whole = [weight for weight, _ in module.get_tied_weights_and_groups() if id(weight) in offsets]
        whole = {id(parameter) for parameter in self._kept_whole}

        def plan(parameters: Iterable[Parameter]) -> list[Bucket]:
            return plan_buckets(parameters, offsets, self._part_sizes, optimizer.reduce_bucket_size)

        self._buckets = {
            kind: plan(each for each in parameters if id(each) in offsets and id(each) not in whole)
            for kind, parameters in _list_passes(module).items()
        }
        self._last_buckets = plan(self._kept_whole)
        self._whole = whole
        self.parts: list[torch.Tensor] = []
        self._waiting: list[Bucket] = []  # of the running pass, not yet reduced; the next one last
        self._missing: set[int] = set()  # ids of the next bucket's parameters that have no gradient yet
        self._sent: list[Sent] = []  # the slices of the bucket that is being reduced
        for parameter in (parameter for group in optimizer.bit16_groups for parameter in group):
            parameter.register_post_accumulate_grad_hook(self.add)

    def start_pass(self, chunk: int, half: Half) -> None:
        if not self.parts:
            device = self._optimizer.bit16_groups_flat[0].device
            self.parts = [torch.zeros(size, dtype=torch.float32, device=device) for size in self._part_sizes]
        self._waiting = self._buckets[chunk, half][::-1]
        self._find_missing()

    @torch.no_grad()
    def add(self, parameter: Parameter) -> None:
        """Register that a parameter's gradient is complete, and reduce the buckets that are full."""
        if id(parameter) in self._whole:
            parameter.grad_accum = add_gradient(parameter, parameter.grad_accum)  # type: ignore[attr-defined]
        self._missing.discard(id(parameter))
        while self._waiting and not self._missing:
            self._reduce(self._waiting.pop())
            self._find_missing()

    def _find_missing(self) -> None:
        bucket = self._waiting[-1].parameters if self._waiting else ()
        self._missing = {id(parameter) for parameter in bucket if parameter.grad is None}

    @torch.no_grad()
    def finish_pass(self) -> None:
        """Reduce the remaining buckets, and wait until all are reduced."""
        while self._waiting:
            self._reduce(self._waiting.pop())
        self._finish_sent()

    @torch.no_grad()
    def reduce(self) -> None:
        """Reduce the gradients that stages share, which are summed over the stages by now, and hand all accumulated
        gradients to the optimizer."""
        for parameter in self._kept_whole:
            parameter.grad, parameter.grad_accum = parameter.grad_accum, None  # type: ignore[attr-defined]
        for bucket in self._last_buckets:
            self._reduce(bucket)
        self._finish_sent()
        if self._replicas is not None:
            for part in self.parts:
                average(part, self._replicas, self._reduce_dtype)
        for number, (part, parameters) in enumerate(zip(self.parts, self._optimizer.params_in_partition, strict=True)):
            views = [part.narrow(0, *self._find(parameter, number)) for parameter in parameters]
            self._optimizer.averaged_gradients[number] = GradPartitionBufferGroup(views, part)
        self.parts = []

    def _find(self, parameter: Parameter, group: int) -> tuple[int, int]:
        """The range of a parameter in this rank's part of a group: (start, length)."""
        start = self._offsets[id(parameter)].start - self._rank * self._part_sizes[group]
        stop = min(start + parameter.numel(), self._part_sizes[group])
        return max(start, 0), stop - max(start, 0)

    def _reduce(self, bucket: Bucket) -> None:
        """Start to reduce the gradients of a bucket, and free them. The previous bucket was reduced while this one was
        filled."""
        self._finish_sent()
        self._sent = [self._send(each) for each in bucket.slices]
        for parameter in bucket.parameters:
            parameter.grad = None

    def _send(self, reduced: ReduceSlice) -> Sent:
        gradients = self._collect(reduced.ranges)
        work = None
        if self._size > 1:
            work = dist.reduce(gradients, group=self._group, group_dst=reduced.owner, async_op=True)
        return reduced, gradients, work

    def _collect(self, ranges: Sequence[ParameterRange]) -> torch.Tensor:
        """The gradients of `ranges`, concatenated, in the reduce dtype; a missing gradient is zero. Each is copied
        once, a single one that has the dtype not at all."""
        first = ranges[0].parameter
        if len(ranges) == 1 and first.grad is not None:
            return _flatten(ranges[0], first.grad).to(self._reduce_dtype)
        lengths = [each.length for each in ranges]
        gradients = torch.empty(sum(lengths), dtype=self._reduce_dtype, device=first.device)
        for each, target in zip(ranges, gradients.split(lengths), strict=True):
            gradient = each.parameter.grad
            if gradient is None:
                target.zero_()
            else:
                target.copy_(_flatten(each, gradient))
        return gradients

    def _finish_sent(self) -> None:
        """Wait for the bucket that is being reduced, and add what this rank owns of it to its parts."""
        for reduced, gradients, work in self._sent:
            if work is not None:
                work.wait()
            if reduced.owner == self._rank:
                self._add(reduced, gradients)
        self._sent = []

    def _add(self, reduced: ReduceSlice, gradients: torch.Tensor) -> None:
        lengths = [length for _, _, length in reduced.runs]
        for (group, start, length), received in zip(reduced.runs, gradients.split(lengths), strict=True):
            self.parts[group].narrow(0, start, length).add_(received, alpha=1 / self._size)


def _list_passes(module: StageModule) -> dict[tuple[int, Half], list[torch.nn.Parameter]]:
    """(chunk, half) -> the parameters that may get a gradient in it. Those outside layers (placeholders, those of a
    loss) may get one in any backward pass but the second half."""
    chunks = {chunk: module.list_modules(chunk) for chunk in module.chunk_numbers}
    layers = [layer for found in chunks.values() for layer in found]
    in_layers = {id(parameter) for layer in layers for parameter in layer.parameters()}
    others = [parameter for parameter in module.parameters() if id(parameter) not in in_layers]
    deferred = {
        id(each) for layer in layers for _, part in list_split(layer) for each in part.parameters(recurse=False)
    }
    passes = {}
    for chunk, found in chunks.items():
        own = list({id(each): each for layer in found for each in layer.parameters() if each.requires_grad}.values())
        passes[chunk, Half.both] = own + others
        passes[chunk, Half.inputs] = [each for each in own if id(each) not in deferred] + others
        passes[chunk, Half.weights] = [each for each in own if id(each) in deferred]
    return passes


def _flatten(elements: ParameterRange, gradient: torch.Tensor) -> torch.Tensor:
    return gradient.reshape(-1).narrow(0, elements.first, elements.length)


def _locate(groups: Iterable[Iterable[Parameter]]) -> dict[int, GroupOffset]:
    offsets = {}
    for number, group in enumerate(groups):
        start = 0
        for parameter in group:
            offsets[id(parameter)] = GroupOffset(number, start)
            start += parameter.numel()
    return offsets
