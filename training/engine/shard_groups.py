"""The ranks over which ZeRO partitions: all replicas, or groups of `sharding_parallel_size`, each of which has all
parts. DeepSpeed 0.19.8 has no such groups for stages 1 and 2.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine

from training.distributed.sharding import list_shard_groups
from training.distributed.topology import Layout


@dataclass(frozen=True)
class ShardGroups:
    """Process groups of this rank.

    own: its shard group. replicas: the ranks of all shard groups with the same part. is_first: whether this rank is the
    first of those.
    """

    own: dist.ProcessGroup
    replicas: dist.ProcessGroup
    is_first: bool


def join_shard_groups(layout: Layout, rank: int) -> ShardGroups | None:
    """Create this rank's groups; None where all replicas are one group. All ranks call it."""
    if layout.num_shards == layout.num_weight_replicas:
        return None
    own, replicas = list_shard_groups(layout)
    is_first = any(ranks[0] == rank for ranks in replicas)
    return ShardGroups(
        dist.new_subgroups_by_enumeration(own)[0], dist.new_subgroups_by_enumeration(replicas)[0], is_first
    )


@contextmanager
def shard_within(engine: DeepSpeedEngine, groups: ShardGroups | None) -> Iterator[None]:
    """Within this context, an optimizer that the engine builds is partitioned over this rank's shard group. It averages
    gradients over that group, not yet over all replicas."""
    whole = engine.seq_data_parallel_group
    if groups is not None:
        engine.seq_data_parallel_group = groups.own
    yield
    engine.seq_data_parallel_group = whole


@torch.no_grad()
def average(part: torch.Tensor, group: dist.ProcessGroup, reduce_dtype: torch.dtype) -> None:
    """Average a tensor over the ranks of a group, in place, sent as `reduce_dtype`."""
    sent = part.to(reduce_dtype)
    dist.all_reduce(sent, group=group)
    part.copy_(sent.div_(dist.get_world_size(group)))
