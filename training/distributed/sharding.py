"""The groups of ranks over which ZeRO partitions, with `sharding_parallel_size`: pure arithmetic, for the engine and
the plan.
"""

from __future__ import annotations

from training.distributed.topology import Layout


def list_shard_groups(layout: Layout) -> tuple[list[list[int]], list[list[int]]]:
    """Return (shard groups, groups of ranks with the same part). A shard group has neighbouring ranks, so that it is
    within a host."""
    return layout.topology.split_replicas(layout.num_shards)
