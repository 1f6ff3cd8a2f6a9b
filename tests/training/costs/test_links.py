"""The links that a plan takes for each group of ranks, counted by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from training.config.schema import Device
from training.costs.hardware import GB, Machine
from training.costs.links import (
    NETWORK_LATENCY,
    NODE_LATENCY,
    Sent,
    compute_sending_seconds,
    find_bandwidth,
    find_latency,
)
from training.distributed.topology import CONTEXT, DATA, EXPERTS, PIPE, RING, TENSOR, Layout, Topology

INSIDE, BETWEEN = 400, 50  # GB/s; a node has 8 GPUs
GPUS = Machine(
    name="round", device=Device.cuda, cards_per_node=8, memory=1, usable_memory=1, peak_flops={"bf16": 1}, efficiency=1,
    memory_bandwidth=1, intra_node_bandwidth=INSIDE, inter_node_bandwidth=BETWEEN, host_memory=1,
    host_memory_bandwidth=1, host_link_bandwidth=1, device_name="round",
)  # fmt: skip


@pytest.mark.parametrize(
    ("topology", "together"),  # ranks of a group on a node, the fewest
    [
        (Topology.of(16, experts=8), None),  # each group is a node
        (Topology.of(16, pipe=2, experts=4), None),
        (Topology.of(16, experts=16), 8),
        (Topology.of(12, experts=6), 2),  # of the second group two ranks are on the first node, and set the pace
        (Topology.of(16, tensor=4, experts=4), 2),  # ranks of a group are 4 apart: two on each node
        (Topology.of(16, tensor=8, experts=2), 1),
        (Topology.of(16, context=8, experts=16), 8),  # of both sequences
    ],
    ids=["8 of 16", "4 of two stages", "16", "6 of 12", "tp4", "tp8", "cp8"],
)
def test_rows_for_experts_on_other_nodes_go_over_the_own_link_of_a_rank(
    topology: Topology, together: int | None
) -> None:
    layout = Layout(topology, 1, 1)
    bandwidth, latency = INSIDE, NODE_LATENCY
    if together is not None:
        leaving = (topology.num_expert_shares - together) / (
            topology.num_expert_shares - 1
        )  # of what a rank sends to the others
        bandwidth, latency = BETWEEN / leaving, latency + (NETWORK_LATENCY - NODE_LATENCY) / together
    assert find_bandwidth(EXPERTS, layout, 0, GPUS) == pytest.approx(bandwidth)
    assert find_latency(EXPERTS, layout, 0, GPUS) == pytest.approx(latency)
    assert compute_sending_seconds(Sent({EXPERTS: 3 * GB}), layout, 0, GPUS) == pytest.approx(3 / bandwidth)


@pytest.mark.parametrize(
    ("axis", "topology", "inside", "between"),  # shares of the rate within a node, and links of a rank between nodes
    [
        (TENSOR, Topology.of(8, tensor=8), 7 / 7, None),
        (TENSOR, Topology.of(8, tensor=2), 1 / 7, None),
        (DATA, Topology.of(8, pipe=2), 3 / 7, None),
        (DATA, Topology.of(16, tensor=4), 1 / 7, 2),  # two of a group on each node
        (DATA, Topology.of(16, tensor=8), 1, 1),  # one: nothing is sent within a node
        (EXPERTS, Topology.of(8, experts=4), 3 / 7, None),
        (PIPE, Topology.of(8, pipe=8), 1 / 7, None),
        (RING, Topology.of(8, context=8), 1 / 7, None),
        (CONTEXT, Topology.of(8, context=8), 7 / 7, None),  # all to all
        (RING, Topology.of(16, context=16), 1 / 7, 1),
        (CONTEXT, Topology.of(16, context=16), 7 / 7, 15 / 8),  # of what a rank sends to 15 others 8 leave the node
    ],
)
def test_without_a_switch_a_rank_sends_over_its_link_to_each_other_rank(
    axis: str, topology: Topology, inside: float, between: float | None
) -> None:
    layout = Layout(topology, 1, 1)
    switched, direct = (
        INSIDE * share if between is None else min(INSIDE * share, BETWEEN * between) for share in (1, inside)
    )
    assert find_bandwidth(axis, layout, 0, GPUS) == pytest.approx(switched)
    assert find_bandwidth(axis, layout, 0, replace(GPUS, switched=False)) == pytest.approx(direct)
