"""Buckets of gradients: each element goes once to the rank that owns it, and at stage 1 when its sum is complete."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from training.distributed.topology import Layout, Topology
from training.engine.gradient_sums import list_backward
from training.engine.reduce_buckets import Bucket, GroupOffset, plan_buckets, plan_reductions, reduces_in_passes
from training.pipeline.schedule import Interleaved, OneForwardOneBackward, Schedule, UnitKind
from training.pipeline.weight_gradients import DeferredGradients, split_projections
from training.pipeline.zero_bubble import ZeroBubble

SIZES = ((7, 3), (5,), (11,), (2, 2), (1,))  # of parameters
GROUPS = ((0, 2, 3), (1, 4))


def test_buckets_hold_each_element_once_and_no_more_than_fits() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in SIZES]
    offsets, sizes = {}, []
    for number, group in enumerate(GROUPS):
        start = 0
        for index in group:
            offsets[id(parameters[index])] = GroupOffset(number, start)
            start += parameters[index].numel()
        sizes.append(-(-start // 3))
    buckets = plan_buckets(parameters, offsets, sizes, limit=16)
    assert [[each.numel() for each in bucket.parameters] for bucket in buckets] == [[1, 4, 11], [5], [21]]
    sent: dict[tuple[int, int], list[int]] = {}  # (group, offset in it) -> the element of the parameter there
    for bucket in buckets:
        for reduced in bucket.slices:
            sources = [
                (elements.parameter, each)
                for elements in reduced.ranges
                for each in range(elements.first, elements.first + elements.length)
            ]
            targets = [
                (group, reduced.owner * sizes[group] + each)
                for group, start, length in reduced.runs
                for each in range(start, start + length)
            ]
            for (parameter, element), target in zip(sources, targets, strict=True):
                offset = offsets[id(parameter)]
                assert (offset.group, offset.start + element) == target
                sent.setdefault(target, []).append(element)
    assert len(sent) == sum(each.numel() for each in parameters) and all(len(found) == 1 for found in sent.values())


def test_a_slice_goes_to_one_rank_of_one_process_group() -> None:
    """Experts, in a group of their own, are split over fewer ranks than all else."""
    whole, expert = (torch.nn.Parameter(torch.zeros(length)) for length in (8, 6))
    offsets = {id(whole): GroupOffset(0, 0), id(expert): GroupOffset(1, 0)}
    (bucket,) = plan_buckets([whole, expert], offsets, [2, 3], limit=16, communicators=[0, 1])
    sent = [(each.communicator, each.owner, [run[2] for run in each.runs]) for each in bucket.slices]
    assert sent == [*((0, owner, [2]) for owner in range(4)), *((1, owner, [3]) for owner in range(2))]


@pytest.mark.parametrize("schedule", [OneForwardOneBackward(2, 4), Interleaved(2, 4, 2), ZeroBubble(2, 4)], ids=repr)
@pytest.mark.parametrize("stage_id", [0, 1])
def test_sums_are_reduced_once_in_the_last_pass_that_adds_to_them(schedule: Schedule, stage_id: int) -> None:
    """A chunk has a projection, whose gradient a split backward pass defers, a norm, and one that all chunks share."""
    shared = torch.nn.LayerNorm(3)
    chunks = {
        chunk: torch.nn.ModuleList([torch.nn.Linear(3, 3), torch.nn.LayerNorm(3), shared])
        for chunk in schedule.list_chunks(stage_id)
    }
    for layer in chunks.values():
        split_projections(layer, DeferredGradients())
    whole = torch.nn.ModuleList(chunks.values())
    module: Any = SimpleNamespace(
        chunk_numbers=list(chunks), list_modules=lambda chunk: [chunks[chunk]], parameters=whole.parameters
    )
    passes = list_backward(schedule.list_units(stage_id))

    def find_last(chunk: int, *kinds: UnitKind) -> int:
        return max(number for number, unit in enumerate(passes) if unit.chunk == chunk and unit.kind in kinds)

    half = (UnitKind.backward, UnitKind.input_backward)
    expected = {id(each): max(find_last(chunk, *half) for chunk in chunks) for each in shared.parameters()}
    for chunk, (projection, norm, _) in chunks.items():
        expected |= {id(each): find_last(chunk, *half) for each in norm.parameters()}
        kinds = (UnitKind.weight_backward,) if schedule.splits_backward else (UnitKind.backward,)
        expected |= {id(each): find_last(chunk, *kinds) for each in projection.parameters()}

    def plan(parameters: Any) -> list[Bucket]:
        return [Bucket((each,), ()) for each in parameters]

    planned = plan_reductions(module, passes, once=True, plan=plan)
    found = [(id(bucket.parameters[0]), number) for number, buckets in enumerate(planned) for bucket in buckets]
    assert sorted(found) == sorted(expected.items())


@pytest.mark.parametrize("schedule", [OneForwardOneBackward(2, 2), ZeroBubble(2, 2)], ids=repr)
@pytest.mark.parametrize("once", [True, False])
def test_what_may_get_no_gradient_delays_no_bucket(schedule: Schedule, once: bool) -> None:
    """The placeholder of a parameter group that is empty, with LoRA or divided experts, never gets one."""
    chunks = {
        chunk: torch.nn.Sequential(torch.nn.LayerNorm(3), torch.nn.LayerNorm(3)) for chunk in schedule.list_chunks(0)
    }
    placeholder = torch.nn.Parameter(torch.zeros(1))
    own = [each for layers in chunks.values() for each in layers.parameters()]
    module: Any = SimpleNamespace(
        chunk_numbers=list(chunks), list_modules=lambda chunk: [chunks[chunk]], parameters=lambda: [*own, placeholder]
    )
    everything = [*own, placeholder]
    offsets = {id(each): GroupOffset(number, 0) for number, each in enumerate(everything)}
    sizes = [each.numel() for each in everything]
    passes = list_backward(schedule.list_units(0))
    planned = plan_reductions(
        module, passes, once=once, plan=lambda found: plan_buckets(found, offsets, sizes, limit=3)
    )
    with_it = [buckets for buckets in planned if any(placeholder in set(each.parameters) for each in buckets)]
    assert with_it
    for buckets in with_it:
        assert [placeholder in set(each.parameters) for each in buckets] == [False] * (len(buckets) - 1) + [True]


@pytest.mark.parametrize(
    ("sizes", "has_experts", "expected"),
    [
        ({}, True, True),
        ({"context": 2}, False, True),
        ({"tensor": 2}, True, True),  # its ranks read the same tokens
        ({"context": 2}, True, False),
        ({"experts": 2}, True, False),
    ],
    ids=str,
)
def test_buckets_wait_for_the_end_of_passes_whose_layers_meet_other_tokens(
    sizes: dict[str, int], has_experts: bool, expected: bool
) -> None:
    assert reduces_in_passes(Layout(Topology.of(4, **sizes), 1, 1), has_experts) is expected
