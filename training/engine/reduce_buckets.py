"""Plans which gradients are reduced together, and to which rank each goes. Pure.

ZeRO (`DeepSpeedZeroOptimizer`) concatenates a stage's trained parameters group by group, and splits each group into
equal parts, one per rank of the process group that partitions it: the replicas, or those with the same experts.
Gradients are reduced in buckets, each to the ranks that own its elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from training.distributed.topology import Layout
from training.pipeline.module import StageModule
from training.pipeline.schedule import Unit, UnitKind
from training.pipeline.weight_gradients import list_deferred

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

    owner: that rank, in its process group. communicator: the number of that process group. ranges: what is sent,
    concatenated. runs: where it goes in the owner's parts, each as (group, start, length).
    """

    owner: int
    communicator: int = 0
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


def locate(groups: Iterable[Iterable[Parameter]]) -> dict[int, GroupOffset]:
    """Return the position of each parameter, by its id. groups: the trained parameters, in ZeRO's order."""
    offsets = {}
    for number, group in enumerate(groups):
        start = 0
        for parameter in group:
            offsets[id(parameter)] = GroupOffset(number, start)
            start += parameter.numel()
    return offsets


def plan_buckets(
    parameters: Iterable[Parameter],
    offsets: Mapping[int, GroupOffset],
    part_sizes: Sequence[int],
    limit: int,
    *,
    by_group: bool = False,
    communicators: Sequence[int] = (),
) -> list[Bucket]:
    """Return buckets of up to `limit` elements, or of one larger parameter, in the order in which a backward pass fills
    them.

    parameters: in the order of a forward pass. offsets: by the id of a parameter. part_sizes: of each group, in
    elements. by_group: a slice for each group, so that what it sends is in one piece where a group's sums are.
    communicators: the number of the process group over which each group is split; empty where that is one.
    """
    filled: list[list[Parameter]] = []
    room = 0
    for parameter in reversed(list(parameters)):
        if parameter.numel() > room:
            filled.append([])
            room = limit
        filled[-1].append(parameter)
        room -= parameter.numel()
    return [
        Bucket(tuple(bucket), tuple(_list_slices(bucket, offsets, part_sizes, by_group, communicators)))
        for bucket in filled
    ]


def _list_slices(
    bucket: Sequence[Parameter],
    offsets: Mapping[int, GroupOffset],
    part_sizes: Sequence[int],
    by_group: bool,
    communicators: Sequence[int],
) -> Iterable[ReduceSlice]:
    slices: dict[tuple[int, int, int], ReduceSlice] = {}
    for parameter in sorted(bucket, key=lambda each: offsets[id(each)]):
        group, start = offsets[id(parameter)]
        first = 0
        while first < parameter.numel():
            owner, in_part = divmod(start + first, part_sizes[group])
            length = min(parameter.numel() - first, part_sizes[group] - in_part)
            communicator = communicators[group] if communicators else 0
            key = (owner, communicator, group if by_group else 0)
            owned = slices.setdefault(key, ReduceSlice(owner, communicator))
            owned.append(ParameterRange(parameter, first, length), group, in_part)
            first += length
    return slices.values()


def reduces_in_passes(layout: Layout, has_experts: bool) -> bool:
    """Returns whether buckets may be reduced while a backward pass runs.

    All ranks must launch their collectives in one order, whichever communicator carries them. Layers that divide
    experts or sequences exchange data within a pass, between ranks that read different tokens; and an expert without a
    token has no gradient, so that its bucket is full only at the end of the pass, on that rank alone. Then a bucket
    would be launched before a layer's exchange on one rank, and after it on another.
    """
    return not has_experts or layout.topology.num_expert_shares == layout.context_parallel_size == 1


def plan_reductions(
    module: StageModule, passes: Sequence[Unit], *, once: bool, plan: Callable[[Iterable[Parameter]], list[Bucket]]
) -> list[list[Bucket]]:
    """Return the buckets that are reduced in each backward pass of a step.

    passes: the backward passes of this rank in order. once: reduce each gradient in the last pass that adds to it, when
    it is the step's; else what a pass adds is reduced in that pass. plan: of the parameters of a pass.
    """
    parameters = _list_parameters(module)
    if not once:
        planned = {kind: plan(found) for kind, found in parameters.items()}
        return [planned[unit.chunk, unit.kind] for unit in passes]
    later: set[int] = set()
    buckets = []
    for unit in reversed(passes):
        last = [each for each in parameters[unit.chunk, unit.kind] if id(each) not in later]
        later.update(map(id, last))
        buckets.append(plan(last))
    return buckets[::-1]


def _list_parameters(module: StageModule) -> dict[tuple[int, UnitKind], list[Parameter]]:
    """(chunk, kind of backward pass) -> the parameters that may get a gradient in it, in the order of a forward pass.

    Those outside layers (placeholders, those of a loss) may get one in any but the second half, or none at all: a
    bucket with them waits for the end of the pass, so they come first, which is in the last bucket.
    """
    chunks = {chunk: module.list_modules(chunk) for chunk in module.chunk_numbers}
    layers = [layer for found in chunks.values() for layer in found]
    in_layers = {id(parameter) for layer in layers for parameter in layer.parameters()}
    others = [parameter for parameter in module.parameters() if id(parameter) not in in_layers]
    deferred = {id(each) for layer in layers for _, each in list_deferred(layer)}
    passes = {}
    for chunk, found in chunks.items():
        own = list({id(each): each for layer in found for each in layer.parameters() if each.requires_grad}.values())
        passes[chunk, UnitKind.backward] = others + own
        passes[chunk, UnitKind.input_backward] = others + [each for each in own if id(each) not in deferred]
        passes[chunk, UnitKind.weight_backward] = [each for each in own if id(each) in deferred]
    return passes
