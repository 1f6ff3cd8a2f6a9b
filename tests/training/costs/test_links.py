"""The links that a plan takes for each group of ranks, counted by hand."""

from __future__ import annotations

import pytest

from training.config.schema import Device
from training.costs.hardware import GB, Machine
from training.costs.time import (
    NETWORK_LATENCY,
    NODE_LATENCY,
    Sent,
    compute_sending_seconds,
    find_bandwidth,
    find_latency,
)
from training.distributed.topology import EXPERTS, Layout, Topology

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
    sent = Sent({EXPERTS: 3 * GB}, {EXPERTS: 5})
    assert compute_sending_seconds(sent, layout, 0, GPUS) == pytest.approx(3 / bandwidth + 5 * latency)
