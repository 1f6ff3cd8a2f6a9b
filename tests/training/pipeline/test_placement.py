"""Where parameters are on the axes: who sums their gradients, counts them and saves them, and under which names."""

from __future__ import annotations

from dataclasses import replace

import pytest

from models.parallel.shard import ShardLayout
from training.checkpoint.optimizer_state import Fragment, file_name
from training.distributed.topology import CONTEXT, DATA, PIPE, TENSOR, Topology
from training.engine.engine import PartitionSlice
from training.pipeline.placement import Placement, parse_shard, render_shard

RANKS = Topology.of(8, pipe=2, tensor=2)
SHARD = ShardLayout(80, ((40, 40),))
REPLICATED = Placement(RANKS, stages=(1,))
PARTIAL = replace(REPLICATED, partial=(TENSOR,))  # the norm of heads, of which each rank has some
SHARDED = replace(REPLICATED, sharded=(TENSOR,), shard=SHARD)
HELD = PartitionSlice(partition=0, start=0, length=1, parameter_start=0)
TIED = replace(SHARDED, stages=(0, 1))


@pytest.mark.parametrize(
    ("placement", "gradient", "norm", "savers"),
    [
        (REPLICATED, (DATA, CONTEXT), (PIPE,), [4, 6]),
        (PARTIAL, (DATA, CONTEXT, TENSOR), (PIPE,), [4, 6]),
        (SHARDED, (DATA, CONTEXT), (PIPE, TENSOR), [4, 5, 6, 7]),
        (TIED, (PIPE, DATA, CONTEXT), (TENSOR,), [0, 1, 2, 3]),
    ],
)
def test_what_follows_from_a_placement(
    placement: Placement, gradient: tuple[str, ...], norm: tuple[str, ...], savers: list[int]
) -> None:
    assert (placement.gradient_axes, placement.norm_axes) == (gradient, norm)
    assert [rank for rank in range(8) if placement.is_saved_by(rank)] == savers


def test_a_norm_counts_each_element_once() -> None:
    """Over the ranks that count: one per element of a stage's parameter, and of a tied one in all."""
    for placement in (REPLICATED, PARTIAL, SHARDED, TIED):
        alike = placement.topology.others(*placement.norm_axes)
        stages = {rank for rank in range(8) if RANKS.index(rank, PIPE) in placement.stages}
        counting = [rank for rank in stages if RANKS.index(rank, *alike) == 0]
        assert len(counting) == RANKS.size(*placement.sharded)


def test_ranks_that_share_a_sequence_have_weights_alike() -> None:
    ranks = Topology.of(16, pipe=2, context=2, tensor=2)
    whole = replace(REPLICATED, topology=ranks)
    assert whole.gradient_axes == (DATA, CONTEXT)
    savers = [rank for rank in range(16) if whole.is_saved_by(rank)]
    assert savers == [8, 10, 12, 14]  # each has a fragment of the state
    assert len({file_name(ranks, rank) for rank in range(16)}) == 16


def test_names_on_disk_stay_as_they_were() -> None:
    def label(shard: ShardLayout | None) -> str:
        return Fragment(
            "model.norm.weight", owned=True, shard=shard, start=7, states={}, held=HELD, is_weight=False
        ).label

    assert label(None) == "model.norm.weight@7"
    assert label(SHARD) == "model.norm.weight[80:40+40]@7"
    assert label(ShardLayout(9, ((0, 2), (5, 1)))) == "model.norm.weight[9:0+2,5+1]@7"
    runs_of_strides = ShardLayout(9, ((0, 2), (5, 1)), strides=((2, 2), (7, 1)))
    assert label(runs_of_strides) == "model.norm.weight[2+2,7+1/9:0+2,5+1]@7"
    for shard in (None, SHARD, ShardLayout(9, ((0, 2), (5, 1))), runs_of_strides):
        assert parse_shard(render_shard(shard)) == shard
    assert [file_name(RANKS, rank) for rank in (0, 7)] == [
        "optimizer-stage_00-dp_00-tp_00.safetensors",
        "optimizer-stage_01-dp_01-tp_01.safetensors",
    ]
    assert file_name(Topology.of(4, pipe=2), 3) == "optimizer-stage_01-dp_01.safetensors"
