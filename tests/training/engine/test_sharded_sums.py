"""Accumulated gradients, sharded over replicas: each element goes once to the rank that owns it, whatever the order in
which gradients come, and whether they come at all."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from support.workers import WorkerGroup

from training.engine.sharded_sums import GroupOffset, plan_buckets

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


def test_a_gradient_that_is_missing_on_one_rank_counts_as_zero(workers: Callable[[int], WorkerGroup]) -> None:
    """Ranks whose gradients come in different orders, and not all of them, run the same collectives."""
    results = workers(2).run(sum_two_passes)
    for number, group in enumerate(GROUPS):
        expected = torch.cat([draw(0, index).add(draw(1, index)).flatten() for index in group])  # twice the mean
        found = torch.cat([parts[number] for parts in results])[: len(expected)]
        torch.testing.assert_close(found, expected)


def draw(rank: int, index: int) -> torch.Tensor:
    """The gradient of a parameter in each pass; rank 1 has none of the third."""
    values = torch.randn(SIZES[index], generator=torch.Generator().manual_seed(10 * rank + index))
    return torch.zeros(SIZES[index]) if (rank, index) == (1, 2) else values


def sum_two_passes() -> list[torch.Tensor]:
    import torch.distributed as dist

    from training.engine.sharded_sums import ShardedSums
    from training.optim.gradient_sums import Half

    rank = dist.get_rank()
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in SIZES]
    groups = [[parameters[index] for index in group] for group in GROUPS]
    optimizer = SimpleNamespace(
        bit16_groups=groups, bit16_groups_flat=[torch.zeros(1)] * 2, averaged_gradients={}, reduce_bucket_size=16,
        partition_size=[-(-sum(each.numel() for each in group) // 2) for group in groups],
        params_in_partition=[[], []], dp_process_group=dist.group.WORLD,
    )  # fmt: skip
    # A stage of one layer that has them all
    layer = torch.nn.ParameterList(parameters)
    module: Any = SimpleNamespace(
        chunk_numbers=[0], list_modules=lambda chunk: [layer], parameters=layer.parameters,
        get_tied_weights_and_groups=list,
    )  # fmt: skip
    sums = ShardedSums(module, optimizer, torch.float32)
    for number in range(2):
        sums.start_pass(0, Half.both)
        for index in (0, 1, 2, 3, 4) if number == rank else (4, 3, 2, 1, 0):
            if (rank, index) != (1, 2):
                parameters[index].grad = draw(rank, index)
                sums.add(parameters[index])
        sums.finish_pass()
        assert all(parameter.grad is None for parameter in parameters)
    sums.reduce()
    return [optimizer.averaged_gradients[number].flat_partition for number in range(2)]
