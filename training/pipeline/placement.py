"""The placement of a parameter on the axes of the ranks, which determines how its gradient, norm and files are handled.

Along an axis a parameter is *sharded* (each rank has a shard of it) or *replicated* (each rank has the same values);
along `pipe` it is in one stage, or *tied*: replicated in several. From this follow

    gradient   summed over the replicated axes along which each rank sees a share of its uses: samples, heads, stages
    norm       shards add up; along every other axis one rank counts
    saving     by the first rank along each replicated axis; where ZeRO partitions the state, each rank has a fragment
    label      of a saved fragment: where the elements of the shard lie in the whole parameter
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from models.parallel.shard import ShardLayout
from training.distributed.topology import PIPE, Topology


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
