"""A cost term is a line in a table: what it says reaches the plan, the report and the fit check, and nothing else has
to change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from support.configs import build_config

from training.config.schema import Device
from training.cost_terms import table
from training.cost_terms.buffers import count_on_the_way
from training.cost_terms.cost_term import Kept, Memory, PassCost, PlannedRun, Stage, StepCost, list_stages
from training.cost_terms.split import build_find_stop
from training.costs.cost import Bytes, LayerCost, Parameters, Work
from training.costs.hardware import GB, GIB, Machine
from training.costs.links import Sent
from training.distributed.topology import DATA, TENSOR, Layout, Topology
from training.pipeline.partition import balance
from training.plan_command.report import render_plan, render_table
from training.planner.plan import Plan, compute_plan

M = 8
GPU = Machine(
    name="round", device=Device.cuda, cards_per_node=8, memory=100, usable_memory=1, efficiency=1,
    peak_flops={"bf16": 1e12, "fp32": 1e12}, memory_bandwidth=1000, intra_node_bandwidth=100,
    inter_node_bandwidth=10, host_memory=100, host_memory_bandwidth=400, host_link_bandwidth=20, device_name="round",
)  # fmt: skip
LAYER = LayerCost(
    name="x",
    parameters=Parameters(held=10**6, trained=10**6, active=10**6, largest_trained=1000),
    work=Work(forward_flops=1e9, attention_width=0),
    bytes=Bytes(saved=10**6, output=10**5),
)
DUMMY: dict[str, Callable[[Any], Any]] = {
    "STAGE_MEMORY": lambda stage: Memory(buffers=3 * GIB, host=5 * GIB) if stage.stage_id == 0 else Memory(),
    "CHUNK_MEMORY": lambda chunk: Kept(activations=GIB),
    "PASSES": lambda chunk: PassCost(
        forward_flops=2e9, forward_seconds=0.25, backward_seconds=0.5, sent=Sent({TENSOR: 50 * GB})
    ),
    "STEP": lambda stage: StepCost(reduce_seconds=1.0, reduce_sent=Sent({DATA: 200 * GB}), optimizer_seconds=4.0),
}


def add_dummy(monkeypatch: pytest.MonkeyPatch) -> None:
    for terms, dummy in DUMMY.items():
        monkeypatch.setattr(table, terms, (*getattr(table, terms), dummy))


@pytest.fixture
def with_dummy(monkeypatch: pytest.MonkeyPatch) -> None:
    add_dummy(monkeypatch)


def describe_run() -> PlannedRun:
    keys = ("precision=bf16", "num_stages=2", "max_seq_length=100", "activation_checkpoint_interval=0")
    return PlannedRun(build_config(*keys), Layout(Topology.of(4, pipe=2), 1, M), 50, GPU)


def plan() -> Plan:
    return compute_plan([LAYER] * 4, [0, 2, 4], describe_run())


PLAIN = plan()


@pytest.mark.usefixtures("with_dummy")
def test_its_bytes_are_in_the_plan() -> None:
    for plain, found, in_flight, once in zip(PLAIN.stages, plan().stages, (2, 1), (3, 0), strict=True):
        assert found.memory.backward_peak == plain.memory.backward_peak + (in_flight + once) * GIB
        assert found.memory.peak == found.memory.backward_peak
        assert found.memory.buffers == plain.memory.buffers + once * GIB
    assert plan().host_bytes == PLAIN.host_bytes + 2 * 5 * GIB  # two replicas of the first stage


@pytest.mark.usefixtures("with_dummy")
def test_its_seconds_are_in_the_plan() -> None:
    found = plan()
    for plain, stage in zip(PLAIN.stages, found.stages, strict=True):
        assert stage.cost.forward_flops == plain.cost.forward_flops + 2e9
        assert stage.cost.forward_seconds == pytest.approx(plain.cost.forward_seconds + 0.25)
        assert stage.cost.backward_seconds == pytest.approx(plain.cost.backward_seconds + 0.5)
        assert stage.cost.sent[TENSOR] == plain.cost.sent.get(TENSOR, 0) + 50 * GB
    assert found.pipeline_seconds == pytest.approx(PLAIN.pipeline_seconds + (M + 1) * 0.75)
    assert found.reduce_seconds == pytest.approx(PLAIN.reduce_seconds + 1 + 200 / 100)
    assert found.optimizer_seconds == pytest.approx(PLAIN.optimizer_seconds + 4)


@pytest.mark.usefixtures("with_dummy")
def test_its_bytes_and_seconds_are_in_the_report() -> None:
    found = plan()
    buffers, peak, activations = (
        [line.split()[table_header().index(name)] for line in render_table(found)[1:3]]
        for name in ("buffers", "peak", "activations")
    )
    assert [round(float(size)) for size in (*buffers, *activations, *peak)] == [3, 0, 2, 1, 5, 1]
    text = render_plan(found, None)
    assert "+ gradients and weights between replicas 3.0 s + optimizer 4.0 s" in text


def table_header() -> list[str]:
    return render_table(PLAIN)[0].split()


def test_its_bytes_are_in_the_fit_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that holds two layers a stage, but with the term no longer those of the first stage."""
    run = describe_run()
    run = replace(run, hardware=replace(GPU, memory=(PLAIN.fullest.memory.peak + GIB) / GIB))
    assert all(build_find_stop([LAYER] * 4, run)(stage, 2 * stage) >= 2 * stage + 2 for stage in (0, 1))
    assert balance([1] * 4, 2, build_find_stop([LAYER] * 4, run)) == [0, 2, 4]
    add_dummy(monkeypatch)
    run = replace(run)  # which keeps what it has summed
    found = build_find_stop([LAYER] * 4, run)
    assert [found(stage, 2 * stage) >= 2 * stage + 2 for stage in (0, 1)] == [False, True]
    assert balance([1] * 4, 2, build_find_stop([LAYER] * 4, run)) is None
    assert not replace(plan(), run=run).fits


@pytest.mark.parametrize(
    ("keys", "copied"),
    [(("precision=bf16",), 4), (("precision=fp32",), 0), (("precision=bf16", "zero_stage=2"), 0)],
    ids=str,
)
def test_a_cpu_copies_a_gradient_to_fp32_to_add_it(keys: tuple[str, ...], copied: int) -> None:
    layer = replace(LAYER, parameters=replace(LAYER.parameters, largest_trained=5 * 10**6, largest_made=5 * 10**6))
    run = replace(describe_run(), config=build_config("num_stages=2", "activation_checkpoint_interval=0", *keys))
    on_gpu, on_cpu = (
        compute_plan([layer] * 4, [0, 2, 4], replace(run, hardware=replace(GPU, device=device)))
        for device in (Device.cuda, Device.cpu)
    )
    assert (
        on_cpu.stages[0].memory.buffers - on_gpu.stages[0].memory.buffers == copied * layer.parameters.largest_trained
    )


@pytest.mark.parametrize(
    ("keys", "counted"),
    [
        (("precision=bf16",), 2 * 10**6),
        (("precision=fp32",), 4 * 5 * 10**6),
        (("precision=bf16", "zero_stage=2"), 10**7),
    ],
    ids=str,
)
def test_a_gpu_makes_no_gradient_that_is_added_to_a_lent_sum(keys: tuple[str, ...], counted: int) -> None:
    layer = replace(LAYER, parameters=replace(LAYER.parameters, largest_trained=5 * 10**6, largest_made=10**6))
    head = replace(LAYER, parameters=replace(LAYER.parameters, largest_trained=10**9, largest_made=10**9))
    run = replace(describe_run(), config=build_config("num_stages=2", "activation_checkpoint_interval=0", *keys))
    first, last = list_stages(run, [layer, layer, layer, head], [0, 2, 4])
    assert count_on_the_way(first) == count_on_the_way(last) == counted  # the head's gradient is in the loss


def test_a_head_that_is_the_embedding_of_its_stage_leaves_its_gradient_to_autograd() -> None:
    head = replace(LAYER, tied_key="embedding", parameters=replace(LAYER.parameters, largest_made=10**6))
    run = replace(describe_run(), layout=Layout(Topology.of(1), 1, M))
    (stage,) = list_stages(run, [replace(head, parameters=LAYER.parameters), LAYER, head], [0, 3])
    assert count_on_the_way(stage) == 2 * 10**6


def test_a_last_stage_is_measured_with_its_head() -> None:
    """Without its frozen head it would be taken to have the loss of a head that is trained, which takes more."""
    parameters = replace(LAYER.parameters, trained=0, largest_trained=0)
    costs = [*[LAYER] * 3, replace(LAYER, parameters=parameters)]
    run = replace(describe_run(), vocab_size=10**6)
    whole, part = (table.sum_memory(Stage(run, 1, costs, [range(1, stop)])).peak for stop in (4, 3))
    assert part > whole
    find_stop = build_find_stop(costs, replace(run, hardware=replace(GPU, memory=whole / GIB)))
    assert find_stop(1, 1) == 4


@pytest.mark.parametrize(("precision", "size"), [("bf16", 2), ("fp32", 4)])
def test_gloo_copies_the_weights_that_it_gathers(precision: str, size: int) -> None:
    run = replace(describe_run(), config=build_config("num_stages=2", f"precision={precision}"))
    on_cpu, on_gpu, alone = (
        compute_plan([LAYER] * 4, [0, 2, 4], replace(run, hardware=replace(GPU, device=device), layout=layout))
        for device, layout in (
            (Device.cpu, run.layout),
            (Device.cuda, run.layout),
            (Device.cpu, Layout(Topology.of(2, pipe=2), 1, M)),
        )
    )
    trained = 2 * LAYER.parameters.trained
    assert [plan.stages[0].memory.step for plan in (on_cpu, on_gpu, alone)] == [size * trained, 0, 0]


@pytest.mark.parametrize("interval", [0, 1, 3])
def test_the_fit_check_finds_what_each_range_of_layers_takes(interval: int) -> None:
    """Its search by halves against the memory of every range, with layers of two sizes and a limit amid them."""
    large = replace(
        LAYER,
        parameters=replace(LAYER.parameters, held=3 * 10**6, trained=3 * 10**6),
        bytes=replace(LAYER.bytes, saved=4 * 10**6),
    )
    costs = [large if number in (0, 5, 11) else replace(LAYER) for number in range(12)]
    config = replace(describe_run().config, num_stages=4, activation_checkpoint_interval=interval)
    run = PlannedRun(config, Layout(Topology.of(8, pipe=4), 1, M), 50, GPU)

    def measure(stage: int, start: int, stop: int) -> int:
        return table.sum_memory(Stage(run, stage, costs, [range(start, stop)])).peak

    run = replace(run, hardware=replace(GPU, memory=measure(1, 4, 7) / GIB))
    find_stop = build_find_stop(costs, run)
    ranges = [(0, 0, stop) for stop in range(1, 10)]
    ranges += [
        (stage, start, stop) for stage in (1, 2) for start in range(1, 9) for stop in range(start + 1, 9 + stage)
    ]
    ranges += [(3, start, 12) for start in range(3, 12)]
    found = [stop <= find_stop(stage, start) for stage, start, stop in ranges]
    assert found == [measure(*each) <= run.hardware.usable_bytes for each in ranges]
    assert True in found and False in found


def test_chunks_of_the_same_layers_have_the_stage_of_a_model_in_memory_beside_them() -> None:
    """The middle stages of the model that is trained are alike, those of the frozen one are not."""
    layout = Layout(Topology.of(4, pipe=4), 1, M)
    run = replace(describe_run(), config=build_config("num_stages=4"), layout=layout)
    stages = list_stages(run, [LAYER] * 11, [0, 1, 2, 9, 11])
    both = compute_plan([LAYER] * 8, [0, 2, 4, 6, 8], replace(run, auxiliary=stages))
    plain = compute_plan([LAYER] * 8, [0, 2, 4, 6, 8], run)
    added = [each.memory.weights - own.memory.weights for each, own in zip(both.stages, plain.stages, strict=True)]
    assert added == [2 * LAYER.parameters.held * each for each in (1, 1, 7, 2)]
    forward = [[stage.chunks[0].cost.forward_seconds for stage in each.stages] for each in (both, plain)]
    seconds = [with_other - alone for with_other, alone in zip(*forward, strict=True)]
    assert seconds[2] == pytest.approx(7 * seconds[1]) and seconds[1] > 0
