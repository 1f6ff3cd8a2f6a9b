"""The shards of a layer's tensors on one rank: over the ranks that share the layer, and over those that share its
experts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from models.parallel.shard import NO_EP, NO_TP, ExpertParallel, ShardLayout, ShardSpec, TensorParallel
from models.sharding.expert_parallel import gather_experts, list_expert_specs
from models.sharding.tensor_parallel import list_shard_specs


@dataclass(frozen=True)
class LayerShards:
    """By the name of a tensor, how it is sharded over each of the two groups; a tensor may be by both, or neither."""

    parallel: TensorParallel
    expert_parallel: ExpertParallel
    tensor_specs: Mapping[str, ShardSpec]
    expert_specs: Mapping[str, ShardSpec]

    def take(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of a whole tensor: a view where it is one run."""
        if name in self.expert_specs:
            whole = self.expert_specs[name].take(whole, self.expert_parallel)
        return self.tensor_specs[name].take(whole, self.parallel) if name in self.tensor_specs else whole

    def locate(self, name: str, shape: Sequence[int]) -> ShardLayout | None:
        """Return where this rank's shard, of this shape, lies in the whole tensor; None where it is whole."""
        spec, experts = self.tensor_specs.get(name), self.expert_specs.get(name)
        if spec is None:
            return None if experts is None else experts.locate(shape, self.expert_parallel)
        if experts is None:
            return spec.locate(shape, self.parallel)
        both: list[tuple[ShardSpec, TensorParallel | ExpertParallel]] = [
            (spec, self.parallel), (experts, self.expert_parallel)
        ]  # fmt: skip
        (outer, rows), (inner, columns) = sorted(both, key=lambda each: each[0].dim)
        assert outer.dim == 0 < inner.dim, "the other dimension is the first"
        per_row = math.prod(shape[1 : inner.dim])
        runs = ((start * per_row, (stop - start) * per_row) for start, stop in outer.intervals(rows.rank, rows.size))
        return replace(inner.locate(shape, columns), strides=tuple(runs))

    def gather(self, name: str, shard: torch.Tensor) -> torch.Tensor:
        """Return the tensor, whole but for the experts of other ranks. All ranks that share the layer call it."""
        return self.tensor_specs[name].gather(shard, self.parallel) if name in self.tensor_specs else shard

    def gather_experts(self, name: str, run: torch.Tensor, owner: int) -> torch.Tensor | None:
        """Return what `gather` has returned of a tensor of experts, with those of all ranks, in the host's memory of
        rank `owner` of the ranks that divide them; None on the others, which call it too."""
        return gather_experts(self.expert_specs[name], run, self.expert_parallel, owner)


def read_shards(
    module: nn.Module, parallel: TensorParallel = NO_TP, expert_parallel: ExpertParallel = NO_EP
) -> LayerShards:
    """Return the shards of a layer's module, as `shard_module` and `divide_experts` have left it."""
    return LayerShards(parallel, expert_parallel, list_shard_specs(module), list_expert_specs(module))
