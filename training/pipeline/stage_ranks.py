"""The ranks of a stage: which of them share its layers, its sequences and its experts."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch.distributed as dist
from torch import nn

from models.parallel.shard import NO_CP, NO_EP, NO_TP, ContextParallel, ExpertParallel, TensorParallel
from models.sharding.shards import LayerShards, read_shards
from training.distributed.topology import CONTEXT, TENSOR, Topology, join_group
from training.pipeline.schedule import Schedule


@dataclass(frozen=True, kw_only=True)
class StageRanks:
    """A rank's place in the model.

    rank: this one, of all ranks. topology: of all ranks. schedule: says which chunks are this rank's, and whether
    gradients of weights are put off. parallel: the ranks that share its layers. sequence_part: those that share its
    sequences. expert_parallel: those that divide its experts.
    """

    rank: int
    topology: Topology
    schedule: Schedule
    parallel: TensorParallel = NO_TP
    sequence_part: ContextParallel = NO_CP
    expert_parallel: ExpertParallel = NO_EP

    @property
    def replica(self) -> int:
        """The index of this rank among those with the same weights, if they did not divide experts."""
        return self.topology.index(self.rank, *self.topology.weight_replica_axes)

    def read_shards(self, module: nn.Module) -> LayerShards:
        """Return how the tensors of a layer are sharded over these ranks."""
        return read_shards(module, self.parallel, self.expert_parallel)


def join_stage_ranks(
    topology: Topology, schedule: Schedule, rank: int, parts: ContextParallel, splits_sequence: bool = False
) -> StageRanks:
    """Return this rank's place in the model, with the process groups of those that share something with it. All ranks
    call it.

    parts: as `models.sharding.context_parallel.choose_parts` has chosen. splits_sequence: between the blocks of a layer
    too (`sequence_parallel`).
    """
    return StageRanks(
        rank=rank,
        topology=topology,
        schedule=schedule,
        parallel=_join_tensor_parallel(topology, rank, splits_sequence),
        sequence_part=_join_context_parallel(topology, rank, parts),
        expert_parallel=_join_expert_parallel(topology, rank),
    )


def _join_tensor_parallel(topology: Topology, rank: int, splits_sequence: bool) -> TensorParallel:
    size = topology.size(TENSOR)
    if size == 1:
        return NO_TP
    return TensorParallel(topology.index(rank, TENSOR), size, join_group(topology, TENSOR), splits_sequence)


def _join_context_parallel(topology: Topology, rank: int, parts: ContextParallel) -> ContextParallel:
    if parts.size == 1:
        return NO_CP
    return replace(parts, rank=topology.index(rank, CONTEXT), group=join_group(topology, CONTEXT))


def _join_expert_parallel(topology: Topology, rank: int) -> ExpertParallel:
    size = topology.num_expert_shares
    if size == 1:
        return NO_EP
    group = dist.new_subgroups_by_enumeration(topology.split_replicas(size)[0])[0]
    return ExpertParallel(topology.expert_share(rank), size, group)
