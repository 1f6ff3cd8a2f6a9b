"""The dict that DeepSpeed gets."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.cases import Case, build_engine
from support.configs import build_config
from support.tiny import save_llama, save_records, save_tokenizer
from support.workers import WorkerGroup

from errors import UserError
from training.distributed.topology import Layout, Topology
from training.engine.deepspeed_config import REDUCE_BUCKET, build_deepspeed_config

LAYOUT = Layout(Topology.of(4, pipe=2), micro_batch_size=3, gradient_accumulation_steps=5)


def build(*overrides: str) -> dict[str, Any]:
    return build_deepspeed_config(build_config(*overrides), LAYOUT)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("offload", ["none", "cpu"])
@pytest.mark.parametrize("has_accelerator", [False, True])
def test_zero_1_in_every_precision(precision: str, offload: str, has_accelerator: bool) -> None:
    config = build_config(f"precision={precision}", f"offload_optimizer={offload}")
    built = build_deepspeed_config(config, LAYOUT, has_accelerator=has_accelerator)
    assert built["zero_optimization"] == {
        "stage": 1,
        "reduce_bucket_size": REDUCE_BUCKET,
        **({"offload_optimizer": {"device": "cpu", "pin_memory": has_accelerator}} if offload == "cpu" else {}),
        "contiguous_gradients": False,
    }
    assert (built["bf16"]["enabled"], built["fp16"]["enabled"]) == (precision == "bf16", precision == "fp16")
    assert built.get("data_types") == ({"grad_accum_dtype": "bf16"} if precision == "bf16" else None)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_stage_that_is_asked_for(stage: int) -> None:
    """Stage 2 is the project's own, on top of DeepSpeed's stage 1."""
    zero = build(f"zero_stage={stage}")["zero_optimization"]
    assert zero["stage"] == {1: 1, 2: 1, 3: 3}[stage] and zero.get("memory_efficient_linear") == (
        False if stage == 3 else None
    )


@pytest.mark.parametrize("offload", ["none", "cpu"])
def test_sums_of_one_replica_are_not_rounded(offload: str) -> None:
    config = build_config("precision=bf16", f"offload_optimizer={offload}")
    assert build_deepspeed_config(config, Layout(Topology.of(2, pipe=2), 3, 5))["communication_data_type"] == "fp32"


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_gradients_are_reduced_in_the_dtype_that_is_asked_for(precision: str) -> None:
    asked = (f"precision={precision}", "gradient_reduce_dtype=bf16")
    assert build(*asked[:1])["communication_data_type"] == "fp32" and build(*asked)["communication_data_type"] == "bf16"
    alone = build_deepspeed_config(build_config(*asked), Layout(Topology.of(2, pipe=2), 3, 5))
    assert alone["communication_data_type"] == ("fp16" if precision == "fp16" else "fp32")


@pytest.mark.parametrize("norm", [0, 0.5])
def test_clipping_is_always_stated(norm: float) -> None:
    assert build(f"max_grad_norm={norm}")["gradient_clipping"] == norm  # if omitted, DeepSpeed would clip at 1


def test_batch_sizes_are_those_of_the_layout() -> None:
    built = build()
    assert (
        built["train_micro_batch_size_per_gpu"],
        built["gradient_accumulation_steps"],
        built["train_batch_size"],
    ) == (3, 5, 30)


def test_deepspeed_itself_takes_it() -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    for precision in ("fp32", "bf16"):
        read = DeepSpeedConfig(
            {**build(f"precision={precision}", "max_grad_norm=0"), "train_batch_size": 15}
        )  # alone here: dp is 1
        assert (read.zero_optimization_stage, read.gradient_clipping) == (1, 0)


def test_the_group_adds_keys() -> None:
    assert build("+deepspeed.comms_logger.enabled=true")["comms_logger"] == {"enabled": True}
    assert build("+deepspeed.timers.throughput.enabled=true")["timers"] == {"throughput": {"enabled": True}}


def test_no_timer_waits_for_the_device() -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    read = DeepSpeedConfig({**build("zero_stage=3"), "train_batch_size": 15})
    assert not read.timers_config.enabled


@pytest.mark.parametrize("key", ["zero_optimization.stage", "bf16.enabled", "train_batch_size", "gradient_clipping"])
def test_a_key_that_is_written_here_is_refused(key: str) -> None:
    with pytest.raises(
        UserError, match=f"deepspeed.{key.partition('.')[0]} is written from the run's own keys .*; set those instead"
    ):
        build(f"+deepspeed.{key}=0")


@pytest.mark.parametrize("stage", [1, 3])
def test_pythons_garbage_collection_is_off_where_the_group_asks_for_that(
    workers: Callable[[int], WorkerGroup], tmp_path: Path, stage: int
) -> None:
    save_llama(tmp_path / "model", num_hidden_layers=1)
    save_tokenizer(tmp_path / "model")
    records = save_records(tmp_path / "train.jsonl", 8)
    for keys, expected in (((), True), (("+deepspeed.disable_python_gc=true",), False)):
        case = Case(tmp_path / "model", records, tmp_path, overrides=(f"zero_stage={stage}", *keys))
        assert workers(1).run(start_and_look_at_gc, case) == [expected]


def start_and_look_at_gc(case: Case) -> bool:
    """Whether collection is on when an engine has started."""
    try:
        build_engine(case)
        return gc.isenabled()
    finally:
        gc.enable()
