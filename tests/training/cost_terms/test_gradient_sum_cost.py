"""The time of sums of gradients: the bytes that a sum moves, and the seconds that a plan makes of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.configs import build_config
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from training.config.schema import Device, Precision
from training.cost_terms.cost_term import Chunk, PlannedRun
from training.cost_terms.gradients import compute_sums, count_sum_bytes
from training.costs.cost import Bytes, LayerCost, Parameters, Work
from training.costs.hardware import GB, STREAM_RATE, Machine
from training.distributed.topology import Layout, Topology
from training.engine.gradient_sums import add_gradient

GPU = Machine(
    name="any", device=Device.cuda, cards_per_node=8, memory=1, usable_memory=1, peak_flops={"bf16": 1, "fp32": 1},
    efficiency=1, memory_bandwidth=100, intra_node_bandwidth=1, inter_node_bandwidth=1, host_memory=1,
    host_memory_bandwidth=1, host_link_bandwidth=1, device_name="any",
)  # fmt: skip
LAYER = LayerCost(
    name="x",
    parameters=Parameters(held=10**9, trained=10**9, active=1, largest_trained=1),
    work=Work(forward_flops=1.0, attention_width=0),
    bytes=Bytes(saved=1, output=1),
)


class MovedBytes(TorchDispatchMode):
    """Counts the bytes that the operations of torch read and write; views move nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if not function.is_view:
            self.total += sum(t.nbytes for t in tree_leaves((args, result)) if isinstance(t, torch.Tensor))
        return result


@pytest.mark.parametrize(
    ("precision", "device", "micro_batches", "expected"),
    [
        ("bf16", Device.cuda, 1, 6),
        ("bf16", Device.cuda, 4, (6 + 3 * 10) / 4),
        ("bf16", Device.cpu, 8, (6 + 7 * 18) / 8),
        ("fp32", Device.cuda, 1, 8),
        ("fp32", Device.cpu, 4, (8 + 3 * 12) / 4),
        ("fp16", Device.cuda, 2, (4 + 6) / 2),
    ],
)
def test_bytes_by_hand(precision: str, device: Device, micro_batches: int, expected: float) -> None:
    assert count_sum_bytes(Precision(precision), micro_batches, device) == expected


def test_bytes_of_the_operations_in_bf16() -> None:
    """An operation on two dtypes reads each in its own, as on a GPU; a copy does not read what it overwrites."""
    parameter, total = torch.nn.Parameter(torch.ones(1000, dtype=torch.bfloat16)), torch.zeros(1000)
    with MovedBytes() as counter:
        for number in range(3):
            parameter.grad = torch.empty_like(parameter)
            add_gradient(parameter, total, is_first=number == 0)
    made, overwritten = 3 * 2 * 2 * 1000, 4 * 1000  # as the counter sees `empty_like` and `copy_`
    assert counter.total - made - overwritten == 3 * 1000 * count_sum_bytes(Precision.bf16, 3, Device.cuda)


def test_bytes_of_the_operations_in_fp32() -> None:
    parameter, moved = torch.nn.Parameter(torch.ones(1000)), []
    for _ in range(3):
        with MovedBytes() as counter:
            (parameter * 2).backward(torch.ones(1000))
        moved.append(counter.total)
    summed = sum(moved) - 3 * moved[0]  # the first is not added to anything
    copied = 8 * 1000  # the first, to its sum
    assert summed + copied == pytest.approx(3 * 1000 * count_sum_bytes(Precision.fp32, 3, Device.cuda))


def build_chunk(*layers: LayerCost, micro_batches: int = 4) -> Chunk:
    layout = Layout(Topology.of(1), 1, micro_batches)
    run = PlannedRun(build_config("precision=bf16"), layout, 7, GPU)
    return Chunk(run, 0, 0, range(len(layers)), layers, has_loss=True)


def test_seconds_of_a_pass() -> None:
    moved = (6 + 3 * 10) / 4
    assert compute_sums(build_chunk(LAYER)).backward_seconds == pytest.approx(moved * 10**9 / (100 * GB * STREAM_RATE))
    lora = replace(LAYER, parameters=replace(LAYER.parameters, trained=10**6))
    assert compute_sums(build_chunk(lora, lora)).backward_seconds == pytest.approx(
        moved * 2 * 10**6 / (100 * GB * STREAM_RATE)
    )


def test_a_tied_module_is_summed_once_and_a_timed_layer_has_it_in_its_time() -> None:
    tied, timed = replace(LAYER, tied_key="embed"), replace(LAYER, work=replace(LAYER.work, pass_seconds=(1.0, 2.0)))
    once = compute_sums(build_chunk(LAYER)).backward_seconds
    assert compute_sums(build_chunk(tied, tied)).backward_seconds == once
    assert compute_sums(build_chunk(LAYER, timed)).backward_seconds == once
