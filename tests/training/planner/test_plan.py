"""A step by hand: every layer one unit of work on a GPU of round figures."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from support.configs import build_config as build_run_config

from training.config.schema import Device, RunConfig
from training.cost_terms.cost_term import PlannedRun, Stage
from training.cost_terms.gradients import compute_reduction
from training.cost_terms.optimizer_step import compute_update
from training.costs.cost import Bytes, LayerCost, Parameters, Work
from training.costs.hardware import GB, GIB, Machine
from training.costs.links import compute_sending_seconds
from training.distributed.topology import Layout, Topology
from training.plan_command.report import render_run, render_table
from training.planner.plan import Plan, compute_model_flops, compute_plan

HARDWARE = Machine(
    name="round", device=Device.cpu, cards_per_node=4, memory=10, usable_memory=0.5,
    peak_flops={"bf16": 1e12, "fp32": 1e12}, efficiency=0.5, memory_bandwidth=1000, intra_node_bandwidth=100,
    inter_node_bandwidth=10, host_memory=100, host_memory_bandwidth=400, host_link_bandwidth=20, device_name="round",
)  # fmt: skip
N, T, B, V = 1_000_000, 100, 2, 50
SUMS = (6 + 7 * 18) / 8 * 2 * N / (1000 * GB)  # seconds: a micro-batch's gradients of two layers, added to their sums


def layer(tied_key: str | None = None, work: float = 1e6) -> LayerCost:
    return LayerCost(
        name="x",
        tied_key=tied_key,
        parameters=Parameters(held=N, trained=N, active=N, largest_trained=1000),
        work=Work(forward_flops=work, attention_width=0),
        bytes=Bytes(saved=10**6, output=2 * B * T * 64),
    )


def stage(layout: Layout, *overrides: str) -> Stage:
    """The first of `layout`, of one layer."""
    return Stage(PlannedRun(config(*overrides), layout, V, HARDWARE), 0, [layer()], [range(1)])


def config(*overrides: str) -> RunConfig:
    return build_run_config(
        "precision=bf16", f"max_seq_length={T}", "micro_batch_size=2", "gradient_accumulation_steps=8", *overrides
    )


def plan(layout: Layout, layers: list[LayerCost], *overrides: str) -> Plan:
    num_chunks = layout.num_stages * layout.num_chunks
    each = len(layers) // num_chunks
    bounds = [each * chunk for chunk in range(num_chunks)] + [len(layers)]
    return compute_plan(layers, bounds, PlannedRun(config(*overrides), layout, V, HARDWARE))


def list_boundary_bytes(found: Plan) -> list[int]:
    """Those after each chunk, by stage."""
    return [chunk.boundary_bytes for stage in found.stages for chunk in stage.chunks]


def test_the_time_of_a_step() -> None:
    found = plan(Layout(Topology.of(2, pipe=2), B, 8), [layer()] * 4, "activation_checkpoint_interval=0")
    micro_batch = 2 * 1e6 * B * T / (1e12 * 0.5)  # forward, a stage of two layers
    transfer = (2 * B * T * 64 + 8 * B * T / 2) / (100 * GB)
    assert found.stages[0].cost.forward_seconds == pytest.approx(micro_batch)
    assert found.stages[0].cost.backward_seconds == pytest.approx(2 * micro_batch + SUMS)
    assert found.pipeline_seconds == pytest.approx((8 + 1) * (3 * micro_batch + SUMS), rel=20 * transfer / micro_batch)
    assert found.schedule.bubble_share == pytest.approx(1 / 9) and found.imbalance == pytest.approx(0)
    assert list_boundary_bytes(found) == [2 * (2 * B * T * 64) + 12 * B * T, 0]
    assert found.tokens_per_second == pytest.approx(8 * B * T / found.step_seconds)
    assert found.mfu == pytest.approx(6 * 4 * N * 8 * B * T / found.step_seconds / 2e12)


def test_an_interleaved_step() -> None:
    plain, found = (
        plan(layout, [layer()] * 8, "activation_checkpoint_interval=0")
        for layout in (
            Layout(Topology.of(2, pipe=2), B, 8),
            Layout(Topology.of(2, pipe=2), B, 8, num_chunks=2, schedule="interleaved"),
        )
    )
    assert [stage.layers for stage in found.stages] == ["0-1+4-5", "2-3+6-7"]
    for read in (
        lambda stage: stage.num_parameters,
        lambda stage: stage.cost.forward_seconds,
        lambda stage: stage.pass_seconds,
    ):
        assert [*map(read, found.stages)] == pytest.approx([*map(read, plain.stages)])
    transfers = 20 * found.transfer_seconds[0]
    assert found.schedule.bubble_share == pytest.approx(1 / 17) and found.imbalance == pytest.approx(0)
    assert found.pipeline_seconds == pytest.approx(
        (2 * 8 + 1) * (3 * plain.stages[0].cost.forward_seconds + 2 * SUMS) / 2, abs=2 * transfers
    )
    across, _ = list_boundary_bytes(plain)
    assert list_boundary_bytes(found) == [across, across, across, 0]  # from the last stage to the first, too


@pytest.mark.parametrize(
    ("schedule", "num_stages", "shown"),
    [
        ("1f1b", 3, ["1.0 MiB", "2.0 MiB", "-"]),
        ("interleaved", 2, ["4.0 MiB", "2.0 MiB"]),
        ("zero_bubble", 2, ["1.0 MiB", "3.0 MiB"]),  # nothing is sent from chunk 1 to 2
        ("zero_bubble", 3, ["1.0 MiB", "7.0 MiB", "4.0 MiB"]),
    ],
)
def test_a_stage_is_shown_with_the_boundaries_after_its_chunks(
    schedule: str, num_stages: int, shown: list[str]
) -> None:
    """1 MiB crosses the boundary after chunk 0, 2 that after chunk 1, ..., forth and back together."""
    num_chunks = 1 if schedule == "1f1b" else 2
    layout = Layout(Topology.of(num_stages, pipe=num_stages), B, 6, num_chunks=num_chunks, schedule=schedule)
    layers = [
        replace(layer(), bytes=replace(layer().bytes, output=(number + 1) * 2**19))
        for number in range(num_stages * num_chunks)
    ]
    rows = render_table(plan(layout, layers))[1 : num_stages + 1]
    assert [re.split(r"\s\s+", row)[-1] for row in rows] == shown


def test_checkpointing_computes_all_but_the_head_again() -> None:
    found = plan(Layout(Topology.of(2, pipe=2), B, 8), [layer()] * 4, "activation_checkpoint_interval=1")
    assert [stage.cost.backward_flops for stage in found.stages] == [3 * 2e6, 3 * 2e6 - 1e6]


@pytest.mark.parametrize(("interval", "recomputed"), [(0, (0, 0)), (1, (1 + 1, 1))])
def test_layers_that_were_timed_take_their_seconds_and_again_what_is_recomputed(
    interval: int, recomputed: tuple[int, int]
) -> None:
    timed = replace(layer(), work=replace(layer().work, pass_seconds=(1e-6, 3e-6)))
    found = plan(Layout(Topology.of(2, pipe=2), B, 8), [timed] * 4, f"activation_checkpoint_interval={interval}")
    assert [stage.cost.forward_seconds for stage in found.stages] == pytest.approx([2e-6 * B * T] * 2)
    assert [stage.cost.backward_seconds for stage in found.stages] == pytest.approx(
        [(6 + again) * 1e-6 * B * T for again in recomputed]
    )


def test_a_module_that_layers_of_a_stage_share_is_held_once() -> None:
    tied = layer("embed")
    assert plan(Layout(Topology.of(1), B, 8), [tied, layer(), tied]).stages[0].num_parameters == 2 * N
    assert [
        stage.num_parameters
        for stage in plan(Layout(Topology.of(2, pipe=2), B, 8), [tied, layer(), layer(), tied]).stages
    ] == [
        2 * N,
        2 * N,
    ]


def test_uneven_stages() -> None:
    found = plan(
        Layout(Topology.of(2, pipe=2), B, 8), [layer(work=1e6), layer(work=3e6)], "activation_checkpoint_interval=0"
    )
    half, mean = (3 * work * B * T / (1e12 * 0.5) for work in (1e6, 2e6))
    assert found.imbalance == pytest.approx(half / (mean + SUMS / 2))
    assert found.idle > found.schedule.bubble_share


def test_mfu_by_the_convention_of_palm() -> None:
    """Llama-3-8B: 8.03 B parameters, 32 layers of width 4096, sequence 4096. A known measurement: 10,471 tokens/s on a
    peak of 989e12 is 57.8%."""
    attention = replace(
        layer(),
        parameters=replace(layer().parameters, active=0),
        work=replace(layer().work, attention_width=2 * 4096),
    )
    whole = replace(layer(), parameters=replace(layer().parameters, active=8_030_261_248))
    flops = compute_model_flops([whole, *[attention] * 32], 4096)
    assert flops == 6 * 8_030_261_248 + 12 * 32 * 4096 * 4096
    assert 10_471 * flops / 989e12 == pytest.approx(0.578, abs=0.0005)


def test_a_frozen_parameter_counts_no_gradient() -> None:
    """4 N of what is frozen, 6 N of the adapter on it."""
    frozen = replace(layer(), parameters=replace(layer().parameters, active=N + 10, frozen=N))
    assert compute_model_flops([frozen, layer()], T) == (4 * N + 6 * 10) + 6 * N


def test_what_is_frozen_below_all_that_is_trained_counts_its_forward_pass_alone() -> None:
    ahead = replace(
        layer(),
        parameters=replace(layer().parameters, active=N, frozen=N),
        work=replace(layer().work, attention_width=8),
    )
    trained = replace(
        layer(),
        parameters=replace(layer().parameters, active=N),
        work=replace(layer().work, attention_width=8),
    )
    assert compute_model_flops([ahead, ahead, trained, ahead], T) == (2 + 2 + 6 + 4) * N + (2 + 2 + 6 + 6) * T * 8


def reduce_seconds(layout: Layout, *overrides: str) -> float:
    found = stage(layout, *overrides)
    cost = compute_reduction(found)
    return cost.reduce_seconds + compute_sending_seconds(cost.reduce_sent, layout, 0, HARDWARE)


def test_replicas_exchange_gradients_and_weights_on_a_ring() -> None:
    on_node, across, alone = (
        Layout(Topology.of(4), B, 8),
        Layout(Topology.of(8), B, 8),
        Layout(Topology.of(4, pipe=4), B, 8),
    )
    gigabyte = N / GB
    read, divided = 4 * gigabyte / 1000, 8 * gigabyte / 1000  # the latter by the owner of each
    assert reduce_seconds(on_node) == pytest.approx(read + divided / 4 + 3 / 4 * (4 + 2) * gigabyte / 100)
    assert reduce_seconds(across) == pytest.approx(read + divided / 8 + 7 / 8 * (4 + 2) * gigabyte / 40)
    cast = 6 * gigabyte / 1000  # and back, by the owner
    in_bf16 = cast + read / 2 + (cast + divided) / 8 + 7 / 8 * (2 + 2) * gigabyte / 40  # over the links of four ranks
    assert reduce_seconds(across, "gradient_reduce_dtype=bf16") == pytest.approx(in_bf16)
    assert reduce_seconds(alone) == reduce_seconds(alone, "offload_optimizer=cpu") == 0


def test_later_stages_exchange_more() -> None:
    """8 micro-batches send their gradients, each to one rank, and gather weights for two passes of each."""
    layout, gigabyte = Layout(Topology.of(4), B, 8), N / GB
    summed = 8 * (10 + 12 / 4) * gigabyte / 1000 + 3 / 4 * (8 * 4 + 2) * gigabyte / 100
    assert reduce_seconds(layout, "zero_stage=2") == pytest.approx(summed)
    offloaded, sharded = (reduce_seconds(layout, "zero_stage=3", *more) for more in (["offload_parameters=cpu"], []))
    assert offloaded - sharded == pytest.approx((2 * 8 + 1) * 2 * gigabyte / 4 / 20)


def test_groups_that_share_out_inside_a_node_send_there_and_their_sums_between_nodes() -> None:
    """Eight replicas on two nodes of four: parts and weights inside a node, and each rank's quarter of the sums to the
    other node, once a step."""
    apart, gigabyte = Layout(Topology.of(8), B, 8), N / GB
    together = replace(apart, sharding_parallel_size=4)
    copied = 8 * (10 + 12 / 4) * gigabyte / 1000
    within, between = 3 / 4 * (8 * 4 + 2) * gigabyte / 100, 1 / 2 * 2 * gigabyte / 10
    assert reduce_seconds(together, "zero_stage=2") == pytest.approx(copied + within + between)
    copied = 8 * (10 + 12 / 8) * gigabyte / 1000
    assert reduce_seconds(apart, "zero_stage=2") == pytest.approx(copied + 7 / 8 * (8 * 4 + 2) * gigabyte / 40)
    within = 3 / 4 * (4 + 2) * gigabyte / 100
    assert reduce_seconds(together) == pytest.approx((4 + 8 / 4) * gigabyte / 1000 + within + between)


def test_the_optimizer_is_bound_by_memory() -> None:
    layout = Layout(Topology.of(4, pipe=2), B, 8)
    on_card = compute_update(stage(layout)).optimizer_seconds
    assert on_card == pytest.approx((12 + 28 + 4 + 2) * N / 2 / (1000 * GB))
    offloaded = compute_update(stage(layout, "offload_optimizer=cpu")).optimizer_seconds
    assert offloaded == pytest.approx((4 + 2) * N / 2 / (20 * GB) + 46 * N / 2 * 4 / (400 * GB))


def test_host_memory_is_that_of_the_fullest_node() -> None:
    for layout, bytes_of_stage, expected in (
        (Layout(Topology.of(8, pipe=4), B, 8), [10, 1, 1, 1], 2 * 10 + 2 * 1),
        (Layout(Topology.of(2, pipe=2), B, 8), [10, 1], 11),
    ):
        found = plan(layout, [layer()] * layout.num_stages)
        held = zip(found.stages, bytes_of_stage, strict=True)
        stages = [replace(stage, memory=replace(stage.memory, host=nbytes)) for stage, nbytes in held]
        assert replace(found, stages=stages).host_bytes == expected


def test_a_run_costs_what_its_gpus_cost_while_it_takes() -> None:
    found = plan(Layout(Topology.of(4, pipe=2), 1, 4), [layer() for _ in range(4)])
    priced = replace(found, run=replace(found.run, hardware=replace(HARDWARE, price_per_hour=2.5)))
    assert priced.price(7200) == pytest.approx(4 * 2.5 * 2) and found.price(7200) is None
    assert render_run(priced, 100)[0].endswith(" at 2.5 per GPU and hour")
    assert "1B tokens cost " in render_run(priced, None)[0]
    assert not any("per GPU and hour" in render_run(found, steps)[0] for steps in (100, None))


def test_it_fits_or_not_by_how_much() -> None:
    found = plan(Layout(Topology.of(2, pipe=2), B, 8), [layer()] * 4)
    assert found.fits and found.missing_memory == found.fullest.memory.peak - 5 * GIB
    for smaller in (
        {"memory": (found.fullest.memory.peak - 1) / GIB, "usable_memory": 1.0},
        {"host_memory": (found.host_bytes - 1) / GIB},
    ):
        assert not replace(found, run=replace(found.run, hardware=replace(HARDWARE, **smaller))).fits
