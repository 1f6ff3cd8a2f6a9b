"""The links between ranks: the bandwidth and the latency of each axis of the topology, by where its ranks are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from training.config.schema import Device
from training.costs.hardware import GB, Machine
from training.distributed.sharding import list_shard_groups
from training.distributed.topology import CONTEXT, EXPERTS, PIPE, RING, TENSOR, Layout

# Where ZeRO shards over groups of replicas: the axis of a group, and that of the ranks with the same shard
SHARDS, SAME_SHARD = "shards", "same shard"
# Seconds of a step around a ring, whatever it sends, on a node and between nodes (NCCL's own estimates for large
# messages: src/graph/tuning.cc, `hwLat`, ring, simple, NVLink and network)
NODE_LATENCY, NETWORK_LATENCY = 3.4e-6, 14e-6


class Sent(dict[str, float]):
    """Bytes that a rank sends over each axis of the topology, by the axis's name; and over `SHARDS`, `SAME_SHARD`,
    `EXPERTS` and `RING`."""

    def __add__(self, other: Sent) -> Sent:
        return Sent({axis: self.get(axis, 0) + other.get(axis, 0) for axis in (*self, *other)})


def compute_sending_seconds(sent: Sent, layout: Layout, stage_id: int, hardware: Machine) -> float:
    """Return the seconds that a rank of a stage takes to send `sent`, one axis after the other, without latencies."""
    rates = {axis: find_bandwidth(axis, layout, stage_id, hardware) * GB for axis, nbytes in sent.items() if nbytes}
    return sum((sent[axis] / rate for axis, rate in rates.items()), start=0.0)


def find_latency(axis: str, layout: Layout, stage_id: int, hardware: Machine) -> float:
    """Return the mean latency, in seconds, of one step around a stage's ring along an axis; 0 on CPUs, where it is not
    counted. Where g ranks of a group are on each node, one step of g is between nodes."""
    if hardware.device is not Device.cuda:
        return 0.0
    num_links, _ = _count_links(axis, replace(layout, pass_times=()), stage_id, hardware.cards_per_node)
    return NODE_LATENCY + ((NETWORK_LATENCY - NODE_LATENCY) / num_links if num_links else 0.0)


def find_bandwidth(axis: str, layout: Layout, stage_id: int, hardware: Machine) -> float:
    """Return the GB/s of a stage's slowest link along an axis; for the pipe that to the next stage, or from the last to
    the first.

    A collective over ranks of which g are on each node crosses between nodes on the links of all g at once: NCCL lays a
    ring through each of them, with a g-th of the data. Stages, and `RING`, send to one rank. Where each rank of E sends
    all others data of its own, that for the E - g on other nodes goes over its own link, the rest inside the node.
    """
    num_links, num_peers = _count_links(axis, replace(layout, pass_times=()), stage_id, hardware.cards_per_node)
    inside = hardware.rate_to(num_peers)
    if num_links is None:
        return inside
    ways: float = num_links
    if axis in (EXPERTS, CONTEXT):
        topology = layout.topology
        size = topology.num_expert_shares if axis == EXPERTS else topology.size(CONTEXT)
        ways = (size - 1) / (size - num_links)
    return min(inside, ways * hardware.inter_node_bandwidth)


@lru_cache(maxsize=2**12)  # each chunk asks, and so does each candidate of a search; links do not depend on times
def _count_links(axis: str, layout: Layout, stage_id: int, cards_per_node: int) -> tuple[int | None, int | None]:
    """Links that a group uses between its nodes, None where each is on one node; and ranks of its node that a rank
    sends to, None for none: the fewest of any group."""
    nodes = [Counter(rank // cards_per_node for rank in ranks) for ranks in _list_groups(axis, layout, stage_id)]
    crossing = [min(counts.values()) for counts in nodes if len(counts) > 1]
    together = [count - 1 for counts in nodes for count in counts.values() if count > 1]
    links, peers = min(crossing, default=None), min(together, default=None)
    if axis in (PIPE, RING):  # a rank sends to the next
        return None if links is None else 1, None if peers is None else 1
    return links, peers


def _list_groups(axis: str, layout: Layout, stage_id: int) -> list[Sequence[int]]:
    """Ranks that send to each other."""
    topology = layout.topology
    if axis == PIPE:
        return [(rank, topology.neighbour(rank, PIPE)) for rank in layout.list_stage_ranks(stage_id)]
    if axis in (SHARDS, SAME_SHARD):
        groups = list_shard_groups(layout)[axis == SAME_SHARD]
    elif axis == EXPERTS:
        groups = topology.split_replicas(topology.num_expert_shares)[0]
    else:
        groups = topology.groups(CONTEXT if axis == RING else axis)
    # A stage waits for its own replicas; of the shards of a layer, the slowest group sets the pace of all stages.
    return (
        [*groups]
        if axis in (CONTEXT, RING, TENSOR, EXPERTS)
        else [ranks for ranks in groups if layout.stage_id(ranks[0]) == stage_id]
    )
