"""Times of ranks become figures of stages, and a table: cases computed by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.configs import build_config
from support.planned import resolve_described
from support.runs import read_metrics
from transformers import LlamaConfig

from data.loading.row_lengths import RowLengths
from errors import UserError
from training.config.schema import Device, RunConfig, load_hardware
from training.config.validate import check_config
from training.costs.hardware import Machine, complete_hardware
from training.distributed.topology import Layout, Topology
from training.observability.metrics import split_stages
from training.observability.stage_timer import RankTimes
from training.observability.telemetry import Telemetry, combine, render_summary
from training.plan_command.report import render_plan
from training.planner.prediction import Prediction, find_machine, predict
from training.resolution.resolve import resolve_layout
from training.resolution.target import Target

LAYOUT = Layout(Topology.of(2, pipe=2), 1, 4)
ARCHITECTURE = LlamaConfig(
    hidden_size=64, intermediate_size=128, num_hidden_layers=5, num_attention_heads=4, vocab_size=320
)  # 8 layers
FIRST = RankTimes(
    num_steps=2,
    step=20.0,
    forward=3.0,
    backward=5.0,
    exchange=1.5,
    optimizer=1.0,
    reduce=0.5,
    pipeline=16.0,
    send_activation=0.25,
    recv_grad=2.0,
    peak_memory=100,
)
LAST = RankTimes(
    num_steps=2,
    step=19.0,
    forward=4.0,
    backward=8.0,
    optimizer=2.0,
    reduce=0.5,
    pipeline=14.0,
    recv_activation=3.0,
    send_grad=0.5,
    peak_memory=300,
)


def test_a_pipeline_of_two_by_hand() -> None:
    measured = combine([FIRST, LAST], LAYOUT)
    assert (measured.num_steps, measured.step_time) == (2, 10.0)
    assert measured.compute_time == [4.5, 7.0]
    assert measured.communication_time == [
        0.625,
        0.625,
    ]  # a boundary takes the time of its faster end: 0.25 forward, 0.5 backward; and 0.5 for gradients
    assert measured.wait_time == [4.875, 2.375] and measured.exchange_time == [0.75, 0.0]
    assert measured.bubble == pytest.approx(1 - 10 / 16) and measured.imbalance == pytest.approx(0.2)
    assert measured.peak_memory == [100, 300]


def test_replicas_of_a_stage_count_by_their_mean_and_their_peak() -> None:
    other = replace(LAST, forward=6.0, peak_memory=500)
    measured = combine([FIRST, FIRST, LAST, other], Layout(Topology.of(4, pipe=2), 1, 4))
    assert measured.compute_time == [4.5, 7.5] and measured.peak_memory == [100, 500]


def test_no_step_no_figures() -> None:
    assert combine([RankTimes(), RankTimes()], LAYOUT) is None


def build_prediction(*overrides: str) -> Prediction:
    config = build_config(
        "num_stages=2",
        "micro_batch_size=1",
        "global_batch_size=8",
        "max_seq_length=64",
        "precision=fp32",
        "hardware=h100",
        *overrides,
    )
    return predict_for(config, complete_hardware(config.hardware, config.precision, 4))


FULL = RowLengths(longest=64, padded=64, filled=64)


def predict_for(config: RunConfig, machine: Machine | None, lengths: RowLengths = FULL) -> Prediction:
    run = resolve_layout(resolve_described(config, ARCHITECTURE, 4), config, Target(4, has_accelerator=False))
    return predict(replace(run, layout=LAYOUT, bounds=[0, 3, 8]), machine, lengths)


class Timer:
    def gather(self) -> list[RankTimes]:
        return [FIRST, LAST]


def test_a_report_has_measured_and_predicted_figures() -> None:
    prediction = build_prediction()
    telemetry = Telemetry(Timer(), LAYOUT, prediction)
    # 64 tokens per row, full rows: steps of 10 s, and as much between two of them
    record = telemetry.describe(telemetry.gather(), 12.8, step_time=20.0)
    per_token = (
        prediction.plan.mfu * prediction.plan.step_seconds / prediction.plan.tokens_per_step
    )  # the convention of the plan
    assert record["mfu"] == pytest.approx(12.8 * per_token)
    assert (
        record["predicted_bubble"] == prediction.plan.idle
        and record["predicted_imbalance"] == prediction.plan.imbalance
    )
    assert record["predicted_peak_memory"] == [stage.memory.peak for stage in prediction.plan.stages]
    assert split_stages(record)["stage1/wait_time"] == 2.375
    telemetry.describe(telemetry.gather(), 51.2, step_time=10.0)
    lines = telemetry.summarize().splitlines()
    assert lines[0] == "measured over 2 steps:"  # the first report warms up
    assert [line.split()[:5] for line in lines[2:4]] == [
        ["0", "0-2", "45.0%", "6.2%", "48.8%"],
        ["1", "3-7", "70.0%", "6.2%", "23.8%"],
    ]
    assert (
        lines[4].startswith("step 10.0 s (predicted")
        and "51 tokens/s" in lines[4]
        and "bubble 37.5%" in lines[4]
        and "imbalance 20.0%" in lines[4]
    )


def test_rates_of_a_run_are_over_its_time() -> None:
    """600 tokens in 4 steps of one second and 2 of two."""
    prediction = build_prediction()
    telemetry = Telemetry(Timer(), LAYOUT, prediction)
    measured = telemetry.gather()
    record = telemetry.describe(measured, 100.0, 10.0) | {"tokens_per_second": 100.0, "bubble": 0.2}
    slow = record | {"tokens_per_second": 50.0, "bubble": 0.1}
    reported = [(replace(measured, num_steps=4, step_time=1.0), record)]
    reported.append((replace(measured, num_steps=2, step_time=2.0), slow))
    figures = render_summary(reported, prediction).splitlines()[-1]
    assert figures.startswith("step 1.3") and "75 tokens/s" in figures and "bubble 15.0%" in figures


def test_time_is_predicted_for_the_padding_of_most_rows_and_memory_for_the_longest() -> None:
    config = build_config(
        "num_stages=2",
        "micro_batch_size=1",
        "global_batch_size=8",
        "max_seq_length=64",
        "precision=fp32",
        "hardware=h100",
    )
    machine = complete_hardware(config.hardware, config.precision, 4)
    full, half, mixed = (
        predict_for(config, machine, lengths=RowLengths(longest, padded, filled))
        for longest, padded, filled in ((64, 64, 64), (32, 32, 32), (64, 32, 16))
    )
    assert mixed.peak_memory == full.peak_memory > half.peak_memory
    assert mixed.plan.step_seconds == half.plan.step_seconds < full.plan.step_seconds
    assert half.mfu is not None and mixed.mfu is not None
    assert full.mfu == pytest.approx(full.plan.mfu) and mixed.mfu < 0.5 * half.mfu, "padding is no work"
    report = render_plan(mixed.plan, 10)  # plan.txt
    assert "32 tokens a sample on average, memory for the longest, of 64" in report
    assert f"{half.plan.tokens_per_second:,.0f} tokens/s with samples of 32 tokens" in report
    memory, longest, shortest = ([stage.memory for stage in each.plan.stages] for each in (mixed, full, half))
    assert memory == longest != shortest and mixed.plan.missing_memory == full.plan.missing_memory
    assert "64 tokens a sample\n" in render_plan(full.plan, 10)


@pytest.mark.full
@pytest.mark.parametrize(
    ("stage", "num_stages", "num_ranks"), [(2, 1, 2), (3, 1, 2), (2, 2, 4)], ids=["stage2", "stage3", "stage2-pp2xdp2"]
)
def test_a_sharded_run_reports_as_another(
    run: Callable[..., Path], stage: int, num_stages: int, num_ranks: int
) -> None:
    keys = ("eval_file=null", "profile_step=2", "profile_trace=3", "precision=bf16")
    names = [f"stage {each}" for each in (1, stage)]
    outs = [run(name, num_stages, num_ranks, *keys, f"zero_stage={name[-1]}") for name in names]
    lines = [read_metrics(out, timed=True) for out in outs]
    assert [len(each) for each in lines] == [4, 4]
    for whole, shared in zip(*lines, strict=True):
        assert shared.keys() == whole.keys() and shared["num_tokens"] == whole["num_tokens"]
        times = [shared[f"{kind}_time"] for kind in ("compute", "communication", "wait")]
        assert all(len(each) == num_stages and min(each) >= 0 for each in times)
        whole_steps = [
            sum(parts) for parts in zip(*times, strict=True)
        ]  # the slowest rank's; the one in the line is this rank's
        assert whole_steps == pytest.approx([whole_steps[0]] * num_stages)
        assert shared["step_time"] / 2 < whole_steps[0] < shared["step_time"] * 2
        assert shared["tokens_per_second"] > 0 and min(shared["peak_memory"]) > 0
        # by the plan of its stage; for so small a model, stage 3 fetches more than it saves
        assert shared["predicted_peak_memory"] != whole["predicted_peak_memory"]
    for out in outs:
        assert (out / "step_2.png").is_file() and (out / "profile_step_3.txt").read_text().startswith("step 3,")
        assert len(list((out / "traces").iterdir())) == num_ranks


def test_a_run_that_reported_nothing_has_no_table() -> None:
    assert Telemetry(Timer(), LAYOUT, build_prediction()).summarize() == ""


def test_on_an_unknown_gpu_mfu_is_omitted() -> None:
    config = build_config("num_stages=2", "micro_batch_size=1", "global_batch_size=8", "max_seq_length=64")
    assert find_machine(config.hardware, "NVIDIA GeForce GTX 1080", config, 1) is None
    telemetry = Telemetry(Timer(), LAYOUT, predict_for(config, None))
    assert "mfu" not in telemetry.describe(telemetry.gather(), 25.6, 10.0)
    assert "MFU" not in telemetry.summarize() and "step 10.0 s (predicted" not in telemetry.summarize()


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H200", "h200"), ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA A100-SXM4-40GB", "a100_40g"),
        ("NVIDIA A100-SXM4-80GB", "a100_80g"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"), ("cpu", "here"), ("NVIDIA B200", "b200"), ("NVIDIA GB200", "gb200"),
        ("NVIDIA B300 SXM6 AC", "b300"), ("NVIDIA GB300", "gb300"), ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 5090", "rtx5090"), ("AMD Instinct MI300X", "mi300x"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx_pro_6000"),
    ],
)  # fmt: skip
def test_the_machine_is_found_by_the_name_of_its_driver(device: str, name: str) -> None:
    config = build_config("hardware=a100_40g")
    machine = find_machine(config.hardware, device, config, 1)
    assert machine.name == name and machine.peak_flops["bf16"] > 0


def test_a_v100_has_no_bf16() -> None:
    config = build_config("hardware=a100_40g", "precision=fp16")
    assert find_machine(config.hardware, "Tesla V100-SXM2-32GB", config, 1).name == "v100_32g"
    config = build_config("hardware=a100_40g", "precision=bf16")
    assert find_machine(config.hardware, "Tesla V100-SXM2-32GB", config, 1) is None


def test_hardware_keys_override_the_machine() -> None:
    config = build_config("hardware=h200", "hardware.peak_flops.bf16=5e14")
    assert find_machine(config.hardware, "NVIDIA H200", config, 1).peak_flops["bf16"] == 5e14
    assert {hardware.name for hardware in load_hardware()} >= {"h100", "h200", "here"}


def test_a_cpu_holds_what_is_offloaded_too() -> None:
    config = build_config(
        "num_stages=2",
        "micro_batch_size=1",
        "global_batch_size=8",
        "max_seq_length=64",
        "offload_optimizer=cpu",
        "hardware=h100",
    )
    on_gpu, on_host = (
        predict_for(config, replace(complete_hardware(config.hardware, config.precision, 4), device=device))
        for device in Device
    )
    assert on_gpu.peak_memory == [stage.memory.peak for stage in on_gpu.plan.stages]
    assert all(host > stage.memory.peak for host, stage in zip(on_host.peak_memory, on_host.plan.stages, strict=True))


def test_a_step_to_draw_is_counted_from_one() -> None:
    with pytest.raises(UserError, match="profile_step=0: at least 1; null turns it off"):
        check_config(build_config("profile_step=0"), has_accelerator=False)
