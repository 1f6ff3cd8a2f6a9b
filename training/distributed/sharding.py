"""Which ranks share out what ZeRO cuts, with `sharding_parallel_size`: pure arithmetic, for the engine and the plan."""

from __future__ import annotations

from training.distributed.topology import Layout


def list_shard_groups(layout: Layout) -> tuple[list[list[int]], list[list[int]]]:
    """(groups that share out, ranks with the same part); neighbours share out, so that a group lies inside a host."""
    size = layout.num_shards
    alike = layout.topology.groups(*layout.topology.weight_replica_axes)
    own = [ranks[first : first + size] for ranks in alike for first in range(0, len(ranks), size)]
    return own, [ranks[first::size] for ranks in alike for first in range(size)]
