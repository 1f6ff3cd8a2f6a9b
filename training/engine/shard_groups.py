"""The ranks over which ZeRO partitions: all replicas, or groups of `sharding_parallel_size`, each of which has all
parts, and of experts the replicas that have the same ones. DeepSpeed 0.19.8 has groups of the second kind, but none of
the first for stages 1 and 2.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine

from training.distributed.sharding import list_shard_groups
from training.distributed.topology import Layout
from training.pipeline.module import StageModule


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


EXPERTS = "experts"  # a name for DeepSpeed, of the groups of parameters that are experts


@dataclass(frozen=True)
class ExpertGroups:
    """Process groups of this rank. own: the ranks that divide the experts of its layers. replicas: those that have the
    same ones."""

    own: dist.ProcessGroup
    replicas: dist.ProcessGroup


def join_expert_groups(module: StageModule) -> ExpertGroups | None:
    """Create this rank's groups; None where each rank has all experts. All ranks call it."""
    ranks = module.ranks
    own = ranks.expert_parallel.group
    if own is None:
        return None
    _, replicas = ranks.topology.split_replicas(ranks.expert_parallel.size)
    return ExpertGroups(own, dist.new_subgroups_by_enumeration(replicas)[0])


def is_expert(parameter: torch.nn.Parameter) -> bool:
    """Return whether a parameter is of experts that ranks divide, by the mark that DeepSpeed knows
    (`deepspeed.moe.utils.is_moe_param`)."""
    return not getattr(parameter, "allreduce", True)


def separate_experts(groups: list[dict[str, Any]], module: StageModule) -> list[dict[str, Any]]:
    """Split each parameter group in two, all else and experts, which ZeRO partitions over other ranks. DeepSpeed knows
    the latter by the key `moe`; all ranks have all groups."""
    divided = {id(parameter) for _, parameter, placement in module.named_hf_parameters() if placement.divided}
    separated = []
    for group in groups:
        experts = [parameter for parameter in group["params"] if id(parameter) in divided]
        others = [parameter for parameter in group["params"] if id(parameter) not in divided]
        separated += [group | {"params": others}, group | {"params": experts, "moe": True, "name": EXPERTS}]
    return separated


@contextmanager
def partition_experts(engine: DeepSpeedEngine, groups: ExpertGroups | None) -> Iterator[None]:
    """Within this context, an optimizer that the engine builds partitions the groups of `separate_experts` over the
    ranks that have the same experts."""
    before = engine.has_moe_layers, engine.expert_parallel_group, engine.expert_data_parallel_group
    if groups is not None:
        engine.has_moe_layers = True
        engine.expert_parallel_group, engine.expert_data_parallel_group = (
            {EXPERTS: groups.own},
            {EXPERTS: groups.replicas},
        )
    yield
    engine.has_moe_layers, engine.expert_parallel_group, engine.expert_data_parallel_group = before


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
