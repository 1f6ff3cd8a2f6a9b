"""The arithmetic of ranks and batches."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.configs import build_config

from errors import UserError
from training.distributed.topology import CONTEXT, DATA, EXPERTS, PIPE, TENSOR, Layout, Topology, build_layout
from training.pipeline.schedules import build_schedule
from training.plan_command.run import check_world_size


def build(*overrides: str, world_size: int = 1, num_layers: int = 8, has_accelerator: bool = False) -> Layout:
    return build_layout(build_config(*overrides), world_size, num_layers, has_accelerator)


@pytest.mark.parametrize(
    "given",
    list(
        itertools.combinations(
            {"micro_batch_size": 2, "gradient_accumulation_steps": 4, "global_batch_size": 16}.items(), 2
        )
    ),
)
def test_the_third_batch_size_follows_from_any_two(given: tuple[tuple[str, int], ...]) -> None:
    layout = build("num_stages=2", *(f"{key}={value}" for key, value in given), world_size=4)
    assert (layout.micro_batch_size, layout.gradient_accumulation_steps, layout.global_batch_size, layout.dp_size) == (
        2,
        4,
        16,
        2,
    )


def test_all_three_batch_sizes_may_be_given_when_they_agree() -> None:
    layout = build("micro_batch_size=2", "gradient_accumulation_steps=4", "global_batch_size=16", world_size=2)
    assert layout == Layout(Topology.of(2), micro_batch_size=2, gradient_accumulation_steps=4)


def test_a_global_batch_means_the_same_at_every_layout() -> None:
    for num_stages, world_size in [(1, 1), (2, 2), (4, 4), (2, 4), (1, 4)]:
        assert (
            build(
                f"num_stages={num_stages}", "micro_batch_size=2", "global_batch_size=16", world_size=world_size
            ).global_batch_size
            == 16
        )


SIZES = st.integers(1, 4)


@given(SIZES, SIZES, SIZES)
def test_ranks_lie_as_deepspeed_lays_them(pipe: int, data: int, tensor: int) -> None:
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    layout = Layout(Topology.of(pipe * data * tensor, pipe=pipe, tensor=tensor), 1, 1)
    topology = PipeModelDataParallelTopology(num_pp=pipe, num_mp=tensor, num_dp=data)
    for rank in range(layout.world_size):
        coordinate = topology.get_coord(rank)
        found = layout.stage_id(rank), layout.dp_rank(rank), layout.topology.index(rank, TENSOR)
        assert found == (coordinate.pipe, coordinate.data, coordinate.model)
    for axis, name in ((PIPE, "pipe"), (DATA, "data"), (TENSOR, "model")):
        # DeepSpeed lists no groups of an axis of size 1
        assert layout.topology.size(axis) == 1 or layout.topology.groups(axis) == topology.get_axis_comm_lists(name)


@given(SIZES, SIZES, SIZES, SIZES, st.sets(st.sampled_from((PIPE, DATA, CONTEXT, TENSOR)), min_size=1))
def test_groups_hold_every_rank_once(pipe: int, data: int, context: int, tensor: int, axes: set[str]) -> None:
    ranks = Topology.of(pipe * data * context * tensor, pipe=pipe, context=context, tensor=tensor)
    groups = ranks.groups(*axes)
    assert sorted(itertools.chain(*groups)) == list(range(ranks.world_size))
    for group in groups:
        assert group == sorted(group) and len(group) == ranks.size(*axes)
        assert [ranks.index(rank, *axes) for rank in group] == list(range(len(group)))
        assert len({ranks.index(rank, *ranks.others(*axes)) for rank in group}) == 1
    (axis,) = sorted(axes)[:1]
    for group in ranks.groups(axis):
        assert [ranks.neighbour(rank, axis) for rank in group] == [*group[1:], group[0]]
        assert [ranks.neighbour(ranks.neighbour(rank, axis), axis, -1) for rank in group] == group


def test_ranks_that_share_layers_are_neighbours() -> None:
    layout = build(
        "num_stages=2", "tensor_parallel_size=3", "micro_batch_size=1", "gradient_accumulation_steps=1", world_size=12
    )
    assert layout.topology.groups(TENSOR)[:2] == [[0, 1, 2], [3, 4, 5]]
    assert layout.global_batch_size == 2 and layout.describe().startswith("tp3 x pp2 x dp2 = 12 ranks")


def test_ranks_that_share_a_sequence_are_replicas_to_deepspeed() -> None:
    from training.engine.deepspeed_config import build_deepspeed_config
    from training.pipeline.module import build_deepspeed_topology

    given = ("num_stages=2", "tensor_parallel_size=2", "micro_batch_size=3", "gradient_accumulation_steps=5")
    config = build_config(*given, "context_parallel_size=3")
    layout = build_layout(config, 24, 8, False)
    ranks = layout.topology

    axes = (PIPE, DATA, CONTEXT, TENSOR)
    assert [ranks.size(axis) for axis in axes] == [2, 2, 3, 2]
    coordinates = list(itertools.product(range(2), range(2), range(3), range(2)))
    assert [tuple(ranks.index(rank, axis) for axis in axes) for rank in range(24)] == coordinates
    assert ranks.groups(CONTEXT)[:3] == [[0, 2, 4], [1, 3, 5], [6, 8, 10]]
    assert ranks.groups(CONTEXT, TENSOR)[1] == [6, 7, 8, 9, 10, 11] == ranks.groups(TENSOR, CONTEXT)[1]
    assert (ranks.neighbour(4, CONTEXT), ranks.neighbour(4, CONTEXT, -1), ranks.neighbour(13, PIPE)) == (0, 2, 1)

    deepspeed_topology = build_deepspeed_topology(ranks)
    for rank in range(24):
        coordinate = deepspeed_topology.get_coord(rank)
        assert coordinate.pipe == ranks.index(rank, PIPE) and coordinate.model == ranks.index(rank, TENSOR)
        assert coordinate.data == ranks.index(rank, DATA, CONTEXT)
    assert deepspeed_topology.get_axis_comm_lists("data") == ranks.groups(*ranks.weight_replica_axes)
    # DeepSpeed counts the samples of each of its `data` ranks; those of a context group share theirs.
    assert layout.global_batch_size == 3 * 5 * 2 and build_deepspeed_config(config, layout)["train_batch_size"] == 90

    assert layout.describe().startswith("tp2 x cp3 x pp2 x dp2 = 24 ranks; global batch 30 = ")
    assert "cp" not in Layout(Topology.of(8, pipe=2), 1, 1).describe()
    product = "num_stages=2 x context_parallel_size=3 x tensor_parallel_size=2"
    with pytest.raises(UserError, match=f"{product} = 12 does not divide the number of started ranks, 16; .*gpus 24"):
        build_layout(config, 16, 8, False)
    config.plan, config.world_size = True, 16
    with pytest.raises(UserError, match=f"world_size=16 is not a multiple of {product}; the nearest is 12 or 24"):
        check_world_size(config)
    with pytest.raises(UserError, match="context_parallel_size=0: at least 1"):
        build_layout(build_config(*given, "context_parallel_size=0"), 16, 8, False)


def describe_placement(layout: Layout, hosts: list[str], sent: dict[str, float] | None = None) -> str:
    return layout.describe_placement(hosts, build_schedule(layout).list_boundaries(), sent)


def test_a_group_that_crosses_hosts_is_reported_with_the_cost() -> None:
    layout = Layout(Topology.of(8, pipe=2, tensor=4), micro_batch_size=1, gradient_accumulation_steps=1)
    assert "warning" not in describe_placement(layout, ["a"] * 4 + ["b"] * 4)
    text = describe_placement(layout, ["a"] * 2 + ["b"] * 6)
    assert (
        "warning: 1 tensor-parallel groups cross hosts, the first of ranks 0-3" in text
        and "four times a micro-batch. Start a multiple of tensor_parallel_size=4 ranks on each host" in text
    )
    both = Layout(Topology.of(16, context=4, tensor=2), micro_batch_size=1, gradient_accumulation_steps=1)
    assert "warning" not in describe_placement(both, ["a"] * 8 + ["b"] * 8)
    text = describe_placement(both, ["a"] * 12 + ["b"] * 4, {CONTEXT: 3 * 2**29, TENSOR: 1.0})
    assert text.count("warning") == 1
    assert (
        "2 context-parallel groups cross hosts, the first of ranks 8, 10, 12, 14: each layer then sends queries, keys, "
        "values and outputs over the network four times a micro-batch, 1.50 GiB of a rank a step. Start a multiple of "
        "context_parallel_size=4 x tensor_parallel_size=2 ranks on each host, or give a smaller context_parallel_size"
    ) in text
    large = describe_placement(both, ["a"] * 4 + ["b"] * 4 + ["c"] * 8)  # one host has room for a whole group
    assert "ranks on each host" in large
    assert "ranks on each host" not in describe_placement(both, [host for host in "abcd" for _ in range(4)])


def test_an_expert_group_that_crosses_hosts_is_reported_with_the_cost() -> None:
    layout = Layout(Topology.of(8, experts=4), micro_batch_size=1, gradient_accumulation_steps=1)
    assert "warning" not in describe_placement(layout, ["a"] * 4 + ["b"] * 4)
    text = describe_placement(layout, ["a"] * 6 + ["b"] * 2, {EXPERTS: 3 * 2**29})
    assert "; warning: 1 expert groups cross hosts, the first of ranks 4-7: each layer then sends rows" in text
    assert "four times a micro-batch, 1.50 GiB of a rank a step. Give an expert_parallel_size that divides" in text


def test_a_rank_is_named_by_its_place() -> None:
    layout = Layout(Topology.of(8, pipe=2, context=2, tensor=2), 1, 1)
    assert [layout.name_rank(rank) for rank in (0, 5, 6)] == ["0 (pp0 cp0 tp0)", "5 (pp1 cp0 tp1)", "6 (pp1 cp1 tp0)"]
    assert Layout(Topology.of(4, pipe=4), 1, 1).name_rank(3) == "3"


def test_the_placement_names_stages_by_host_and_what_crosses() -> None:
    four_by_two = Layout(Topology.of(8, pipe=4), micro_batch_size=1, gradient_accumulation_steps=1)
    assert describe_placement(four_by_two, ["a"] * 4 + ["b"] * 4) == (
        "a: stage 0-1; b: stage 2-3; 2 of 6 stage boundaries and the replicas of 0 of 4 stages cross hosts"
    )
    assert describe_placement(four_by_two, ["a", "b"] * 4) == (
        "a: stage 0-3; b: stage 0-3; 0 of 6 stage boundaries and the replicas of 4 of 4 stages cross hosts"
    )


@pytest.mark.parametrize(
    "schedule, num_stages, crossing",
    [
        ("interleaved", 4, "2 of 4"),
        ("interleaved", 2, "1 of 1"),
        ("zero_bubble", 4, "1 of 3"),
        ("zero_bubble", 2, "1 of 1"),
    ],
)
def test_the_boundaries_of_the_placement_are_those_of_the_schedule(
    schedule: str, num_stages: int, crossing: str
) -> None:
    """Interleaved chunks lead from the last stage to the first, those of a V do not."""
    layout = Layout(Topology.of(num_stages, pipe=num_stages), 1, 4, num_chunks=2, schedule=schedule)
    hosts = ["a"] * (num_stages // 2) + ["b"] * (num_stages // 2)
    assert describe_placement(layout, hosts).endswith(
        f"{crossing} stage boundaries and the replicas of 0 of {num_stages} stages cross hosts"
    )


TWO = ("micro_batch_size=2", "global_batch_size=8")
MISTAKES = {
    "no stage": (("num_stages=0", *TWO), {}, "num_stages=0: at least 1"),
    "more stages than layers": (
        ("num_stages=9", *TWO),
        {"world_size": 9},
        "num_stages=9 exceeds the model's 8 layers (embedding, norm and head count as one each); "
        "set num_stages to 8 or less",
    ),
    "stages do not divide": (
        ("num_stages=2", *TWO),
        {"world_size": 3},
        "num_stages=2 does not divide the number of started ranks, 3; start it with `deepspeed --num_gpus 4 "
        "trainer_base_ds_mp.py ...` "
        "(without GPUs the launcher starts one rank unless --num_gpus says how many processes)",
    ),
    "no rank a layer": (("tensor_parallel_size=0", *TWO), {}, "tensor_parallel_size=0: at least 1"),
    "stages of several ranks do not divide": (
        ("num_stages=2", "tensor_parallel_size=2", *TWO),
        {"world_size": 6},
        "num_stages=2 x tensor_parallel_size=2 = 4 does not divide the number of started ranks, 6; start it with "
        "`deepspeed --num_gpus 8",
    ),
    "stages do not divide, with GPUs": (
        ("num_stages=4", *TWO),
        {"world_size": 6, "has_accelerator": True},
        "--num_gpus 8 trainer_base_ds_mp.py ...` or change num_stages",
    ),
    "one batch size": (
        ("micro_batch_size=2",),
        {},
        "must be given; missing: gradient_accumulation_steps, global_batch_size",
    ),
    "batch size of zero": (("micro_batch_size=0", "global_batch_size=8"), {}, "micro_batch_size=0: at least 1"),
    "three that disagree": (
        ("gradient_accumulation_steps=3", *TWO),
        {"world_size": 2},
        "micro_batch_size=2 x gradient_accumulation_steps=3 x dp=2 is 12, not global_batch_size=8; give two of them "
        "and set the third to null",
    ),
    "no multiple of the micro-batch": (
        ("micro_batch_size=3", "global_batch_size=8"),
        {},
        "global_batch_size=8 is not a multiple of micro_batch_size=3 x dp=1 = 3; the nearest is 6 or 9",
    ),
    "no multiple of the accumulation": (
        ("gradient_accumulation_steps=5", "global_batch_size=8"),
        {"world_size": 2},
        "not a multiple of gradient_accumulation_steps=5 x dp=2 = 10; the nearest is 10",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_contradiction_names_the_keys_and_the_way_out(name: str) -> None:
    overrides, options, message = MISTAKES[name]
    with pytest.raises(UserError) as caught:
        build(*overrides, **options)
    assert message in str(caught.value)


def test_expert_groups_are_neighbours_among_ranks_with_the_same_layers() -> None:
    keys = ("num_stages=2", "context_parallel_size=2", "tensor_parallel_size=2", "micro_batch_size=1")
    keys += ("global_batch_size=4", "expert_parallel_size=2")
    layout = build_layout(build_config(*keys), 16, 8, False)
    topology = layout.topology
    own, replicas = topology.split_replicas(topology.num_expert_shares)
    assert own[:4] == [[0, 2], [4, 6], [1, 3], [5, 7]] and replicas[:4] == [[0, 4], [2, 6], [1, 5], [3, 7]]
    assert all([topology.expert_share(rank) for rank in group] == [0, 1] for group in own)
    assert (layout.dp_size, layout.num_weight_replicas) == (2, 4)
    assert layout.describe().startswith("tp2 x cp2 x pp2 x dp2, ep2 = 16 ranks")
    for size, message in (
        (3, "expert_parallel_size=3 does not divide the 4 ranks that have the same layers"),
        (8, "=8"),
    ):
        with pytest.raises(UserError, match=message):
            build_layout(build_config(*keys, f"expert_parallel_size={size}"), 16, 8, False)


def test_shard_groups_are_neighbours() -> None:
    from training.distributed.sharding import list_shard_groups

    keys = ("num_stages=2", "tensor_parallel_size=2", "micro_batch_size=1", "global_batch_size=4")
    layout = build_layout(build_config(*keys, "sharding_parallel_size=2"), 16, 8, False)
    assert (layout.num_weight_replicas, layout.num_shards) == (4, 2)
    own, replicas = list_shard_groups(layout)
    assert own[:4] == [[0, 2], [4, 6], [1, 3], [5, 7]] and replicas[:4] == [[0, 4], [2, 6], [1, 5], [3, 7]]
    assert sorted(itertools.chain(*own)) == sorted(itertools.chain(*replicas)) == list(range(16))
    with pytest.raises(UserError, match="sharding_parallel_size=3 does not divide the 4 ranks that have the same wei"):
        build_layout(build_config(*keys, "sharding_parallel_size=3"), 16, 8, False)
