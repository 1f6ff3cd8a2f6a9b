"""The placement of a parameter on the axes of the ranks, which determines how its gradient, norm and files are handled.

Along an axis a parameter is *sharded* (each rank has a shard of it) or *replicated* (each rank has the same values);
along `pipe` it is in one stage, or *tied*: replicated in several. From this follow

    gradient   summed over the replicated axes along which each rank sees a share of its uses: samples, heads, stages
    norm       shards add up; along every other axis one rank counts
    saving     by the first rank along each replicated axis; where ZeRO partitions the state, each rank has a fragment
    label      of a saved fragment: where the elements of the shard lie in the whole parameter
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import nn

from models.layers.layer import Layer
from models.parallel.shard import ShardLayout, sum_over_ranks
from models.sharding.tensor_parallel import list_partial_gradients
from training.distributed.topology import PIPE, TENSOR, Topology
from training.pipeline.stage_ranks import StageRanks


@dataclass(frozen=True)
class Placement:
    """The placement of one parameter, on a rank that has it.

    stages: those that have it; the first owns it. sharded: the axes over which it is sharded, and shard: where this
    rank's shard lies in the whole parameter. partial: of the axes that split weights, those along which it is
    replicated though each rank's gradient is a share. divided: whether it is of the experts that the ranks of an expert
    group divide, so that it is replicated along a part of the replicated axes alone.
    """

    topology: Topology
    stages: tuple[int, ...]
    sharded: tuple[str, ...] = ()
    shard: ShardLayout | None = None
    partial: tuple[str, ...] = ()
    divided: bool = False

    @property
    def replicated(self) -> tuple[str, ...]:
        one_stage = () if self.is_tied else (PIPE,)
        return self.topology.others(*self.sharded, *one_stage)

    @property
    def is_tied(self) -> bool:
        return len(self.stages) > 1

    @property
    def gradient_axes(self) -> tuple[str, ...]:
        """The axes over which its gradient is summed."""
        summed = {*self.topology.weight_replica_axes, *self.partial, *([PIPE] if self.is_tied else [])}
        return tuple(axis for axis in self.replicated if axis in summed)

    @property
    def norm_axes(self) -> tuple[str, ...]:
        """The axes along which each rank's share counts for the norm of the gradient; along the others one rank
        counts."""
        return self.topology.others(*self.replicated)

    def is_saved_by(self, rank: int) -> bool:
        """Returns whether the rank saves its optimizer's state of this parameter."""
        alike = [axis for axis in self.replicated if axis not in (PIPE, *self.topology.weight_replica_axes)]
        return self.topology.index(rank, PIPE) == self.stages[0] and self.topology.index(rank, *alike) == 0


@dataclass(frozen=True)
class StageLayer:
    """A layer on this rank. index: in the model, of the layer that owns its weights; spec: its description. stages:
    those that hold its weights, the owner's first. is_own: whether the owner is on this stage too."""

    index: int
    spec: Layer
    module: nn.Module
    stages: tuple[int, ...]
    is_own: bool


def place_parameters(layer: StageLayer, ranks: StageRanks) -> Iterator[tuple[str, nn.Parameter, Placement]]:
    """Yield name, parameter and placement of the parameters of a layer."""
    shards, partial = ranks.read_shards(layer.module), list_partial_gradients(layer.module)
    for name, parameter in layer.module.named_parameters():
        placement = Placement(
            ranks.topology,
            layer.stages,
            sharded=(TENSOR,) if name in shards.tensor_specs else (),
            shard=shards.locate(name, parameter.shape),
            partial=(TENSOR,) if name in partial else (),
            divided=name in shards.expert_specs,
        )
        yield name, parameter, placement


def mark_parameters(layer: StageLayer, ranks: StageRanks) -> None:
    """Mark for DeepSpeed's norm which ranks count for a parameter, and sum gradients of which each rank has a share.
    Called once the weights are loaded."""
    for _, parameter, placement in place_parameters(layer, ranks):
        # For `is_model_parallel_parameter` of deepspeed/runtime/utils.py
        parameter.model_parallel = TENSOR in placement.norm_axes  # type: ignore[attr-defined]
        # For `is_moe_param` of deepspeed/moe/utils.py
        parameter.allreduce = not placement.divided  # type: ignore[attr-defined]
        if TENSOR in placement.gradient_axes and parameter.requires_grad:
            parameter.register_hook(lambda gradient: sum_over_ranks(gradient, ranks.parallel))


def render_shard(shard: ShardLayout | None) -> str:
    """Return `[stride:first+length,...]`, the name of a shard in a file, or `[first+number,.../stride:...]` of one that
    has some of the strides alone; empty for a whole parameter."""
    if shard is None:
        return ""
    strides = f"{_render_runs(shard.strides)}/" if shard.strides else ""
    return f"[{strides}{shard.stride}:{_render_runs(shard.runs)}]"


def parse_shard(label: str) -> ShardLayout | None:
    """Return the shard that `render_shard` has written."""
    if not label:
        return None
    where, _, runs = label.removeprefix("[").removesuffix("]").partition(":")
    strides, _, stride = where.rpartition("/")
    return ShardLayout(int(stride), _parse_runs(runs), _parse_runs(strides))


def _render_runs(runs: Iterable[tuple[int, int]]) -> str:
    return ",".join(f"{first}+{length}" for first, length in runs)


def _parse_runs(text: str) -> tuple[tuple[int, int], ...]:
    pairs = (run.split("+") for run in text.split(",") if run)
    return tuple((int(first), int(length)) for first, length in pairs)
