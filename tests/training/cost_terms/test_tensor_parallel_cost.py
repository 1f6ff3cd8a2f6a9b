"""The plan of ranks that share layers: bytes and steps of their all-reduces, and the seconds that both take."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.configs import build_config

from training.config.schema import Device
from training.cost_terms.cost_term import PlannedRun, Stage
from training.cost_terms.first_pass import compute_first_pass
from training.cost_terms.layer_ranks import compute_sums
from training.cost_terms.layers import compute_passes
from training.costs.cost import Bytes, LayerCost, Parameters, Work
from training.costs.hardware import GB, Machine
from training.costs.links import NETWORK_LATENCY, NODE_LATENCY
from training.distributed.topology import TENSOR, Layout, Topology

SIZE, TOKENS, WIDTH = 4, 1000, 64
HIDDEN = TOKENS * WIDTH * 2  # bytes, in bf16
GPU = Machine(
    name="round", device=Device.cuda, cards_per_node=8, memory=100, usable_memory=1, peak_flops={"bf16": 1e12},
    efficiency=1, memory_bandwidth=1000, intra_node_bandwidth=100, inter_node_bandwidth=10, host_memory=100,
    host_memory_bandwidth=400, host_link_bandwidth=20, device_name="round",
)  # fmt: skip
LAYER = LayerCost(
    name="x",
    parameters=Parameters(held=1, trained=1, active=1, largest_trained=1),
    work=Work(forward_flops=1e9, attention_width=0, forward_sums=2, backward_sums=2),
    bytes=Bytes(saved=1, output=HIDDEN),
)
LAYOUT = Layout(Topology.of(SIZE, tensor=SIZE), 1, 1)


def test_an_all_reduce_is_two_rounds_of_a_ring() -> None:
    """The second layer is the head, which is not recomputed."""
    keys = ("precision=bf16", f"max_seq_length={TOKENS}", "activation_checkpoint_interval=1")
    config = build_config("micro_batch_size=1", f"tensor_parallel_size={SIZE}", *keys)
    cost = compute_sums(Stage(PlannedRun(config, LAYOUT, 50, GPU), 0, [LAYER, LAYER], [range(2)]).chunks[0])
    assert cost.sent == {TENSOR: (4 + 4 + 2) * 2 * (SIZE - 1) / SIZE * HIDDEN}
    assert cost.backward_seconds == pytest.approx((4 + 2) / 4 * cost.forward_seconds)


def test_a_pass_before_the_step_waits_for_its_sums() -> None:
    keys = ("task=kto", "precision=bf16", f"max_seq_length={TOKENS}", "activation_checkpoint_interval=1")
    config = build_config("micro_batch_size=1", f"tensor_parallel_size={SIZE}", *keys)
    chunk = Stage(PlannedRun(config, LAYOUT, 50, GPU), 0, [LAYER, LAYER], [range(2)]).chunks[0]
    first, sums, passes = (compute(chunk) for compute in (compute_first_pass, compute_sums, compute_passes))
    assert first.sending_seconds == sums.forward_seconds > 0
    assert first.forward_seconds == pytest.approx(sums.forward_seconds + passes.forward_seconds)
    assert first.backward_seconds == first.backward_flops == 0
    assert first.sent == {TENSOR: 4 * 2 * (SIZE - 1) / SIZE * HIDDEN}


@pytest.mark.parametrize(
    ("device", "cards_per_node", "link", "latency"),
    [
        (Device.cuda, 8, 100, NODE_LATENCY),
        (Device.cuda, 2, 20, (NODE_LATENCY + NETWORK_LATENCY) / 2),  # two ranks on a node: every second step is between
        (Device.cuda, 1, 10, NETWORK_LATENCY),
        (Device.cpu, 8, 100, 0),
    ],
)
def test_each_step_waits_for_the_link(device: Device, cards_per_node: int, link: float, latency: float) -> None:
    keys = ("precision=bf16", f"max_seq_length={TOKENS}", "activation_checkpoint_interval=0")
    config = build_config("micro_batch_size=1", f"tensor_parallel_size={SIZE}", *keys)
    machine = replace(GPU, device=device, cards_per_node=cards_per_node)
    cost = compute_sums(Stage(PlannedRun(config, LAYOUT, 50, machine), 0, [LAYER], [range(1)]).chunks[0])
    nbytes = 2 * 2 * (SIZE - 1) / SIZE * HIDDEN  # of two sums
    assert cost.forward_seconds == cost.backward_seconds == pytest.approx(nbytes / (link * GB) + 12 * latency)
