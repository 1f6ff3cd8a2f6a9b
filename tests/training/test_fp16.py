"""fp16 on a CPU, where DeepSpeed refuses it unless the processor has fp16: a real run, whose first steps overflow their
loss scale."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file
from support.cases import Case, train_run
from support.families import save_family
from support.router_runs import train_router_oracle
from support.routers import BIAS
from support.tiny import save_llama, save_records, save_tokenizer
from support.workers import WorkerGroup

STEPS = 6


def train_in_fp16(case: Case, initial_scale_power: int = 21, loss_scale_window: int = 1000) -> None:
    from deepspeed.accelerator import get_accelerator

    from training.config import validate
    from training.config.incompatible import CheckedConfig, check_together
    from training.engine import pipeline_engine as engines
    from training.resolution import resolve

    written = engines.build_deepspeed_config

    def check(run: CheckedConfig) -> None:
        check_together(replace(run, has_accelerator=True))

    def build(*arguments: Any) -> dict[str, Any]:
        scale = {"initial_scale_power": initial_scale_power, "loss_scale_window": loss_scale_window}
        return {**written(*arguments), "fp16": {"enabled": True, **scale}}

    with (
        patch.object(engines, "build_deepspeed_config", build),
        patch.object(type(get_accelerator()), "is_fp16_supported", lambda _: True),
        patch.object(validate, "check_together", check),
        patch.object(resolve, "check_together", check),
    ):
        train_run(case)


# Each rank has one micro-batch, so that sums of several are not rounded in another order
PARTITIONED = {
    "stage2": (1, 2, ("zero_stage=2",)),
    "dp4-stage2": (1, 4, ("zero_stage=2",)),  # a sum over more replicas is beyond fp16, where its mean is not
    "pp2-stage2": (2, 4, ("zero_stage=2",)),
    "offloaded": (1, 2, ("zero_stage=2", "offload_optimizer=cpu")),
}
KEPT = ("loss", "grad_norm", "skipped_steps", "loss_scale")
Result = tuple[list[dict[str, Any]], dict[str, torch.Tensor]]  # KEPT of each step, exported weights


@pytest.fixture
def train(workers: Callable[[int], WorkerGroup], tmp_path: Path) -> Callable[..., Result]:
    """train(num_stages, world_size, *overrides), with one micro-batch on each rank."""
    save_llama(tmp_path / "hf", num_hidden_layers=2)
    save_tokenizer(tmp_path / "hf")
    records = save_records(tmp_path / "train.jsonl", 40)

    def run(
        num_stages: int, world_size: int, *overrides: str, function: Callable[[Case], None] = train_in_fp16
    ) -> Result:
        size = 8 * num_stages // world_size
        keys = ("precision=fp16", "logging_steps=1", "save_steps=null", "overwrite_output_dir=true")
        keys += (f"micro_batch_size={size}", *overrides)
        case = Case(tmp_path / "hf", records, tmp_path, num_stages, world_size, STEPS, keys)
        workers(world_size).run(function, case)
        lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
        kept = [{key: line[key] for key in KEPT} for line in lines if "loss" in line]
        return kept, load_file(tmp_path / "out" / "hf" / "model.safetensors")

    return run


@pytest.mark.parametrize(
    "layout", [pytest.param(each, marks=() if each == "stage2" else pytest.mark.full) for each in PARTITIONED]
)
def test_partitioned_gradients_take_the_same_steps(train: Callable[..., Result], layout: str) -> None:
    """Skipped steps, loss scales, losses and weights are those of `zero_stage=1`, to the bit: where one rank's part of
    the gradient overflows, all skip the step."""
    num_stages, world_size, keys = PARTITIONED[layout]
    adamw = ("optimizer=adamw", "learning_rate=1e-3")
    whole, expected = train(num_stages, world_size, *adamw)
    partitioned, weights = train(num_stages, world_size, *adamw, *keys)
    assert partitioned == whole
    assert {line["skipped_steps"] for line in whole} == {0, 1}
    assert [name for name, tensor in expected.items() if not torch.equal(weights[name], tensor)] == []


def train_at_once(case: Case) -> None:
    """With the update of a GPU, compiled for the CPU."""
    from training.engine import pipeline_engine

    with patch.object(pipeline_engine, "has_triton", lambda: True):
        train_in_fp16(case)


@pytest.mark.full
@pytest.mark.parametrize("layout", ["stage2", "pp2-stage2"])
def test_an_update_in_one_pass_skips_the_same_steps(train: Callable[..., Result], layout: str) -> None:
    num_stages, world_size, keys = PARTITIONED[layout]
    adamw = ("optimizer=adamw", "learning_rate=1e-3", "max_grad_norm=0.1", *keys)
    expected, weights = train(num_stages, world_size, *adamw)
    found, others = train(num_stages, world_size, *adamw, function=train_at_once)
    assert {line["skipped_steps"] for line in expected} == {0, 1}
    for line, other in zip(expected, found, strict=True):
        assert all(line[key] == other[key] for key in ("skipped_steps", "loss_scale"))
        assert line["loss"] == pytest.approx(other["loss"], rel=1e-3)
        assert line["grad_norm"] == (other["grad_norm"] and pytest.approx(other["grad_norm"], rel=1e-2))
    for name, tensor in weights.items():
        assert (others[name] == tensor).float().mean() > 0.9, name


def train_while_the_scale_grows(case: Case) -> None:
    train_in_fp16(case, initial_scale_power=6, loss_scale_window=2)


def train_at_one_scale(case: Case) -> None:
    train_in_fp16(case, initial_scale_power=6)


@pytest.mark.parametrize(
    "keys",
    [(), *(pytest.param(each, marks=pytest.mark.full) for each in (("zero_stage=2",), ("offload_optimizer=cpu",)))],
    ids=" ".join,
)
def test_a_step_after_which_the_scale_grows_takes_its_whole_gradient(
    train: Callable[..., Result], keys: tuple[str, ...]
) -> None:
    keys = ("optimizer=sgd", "learning_rate=0.5", "max_grad_norm=0", *keys)
    expected, weights = train(1, 2, *keys, function=train_at_one_scale)
    found, others = train(1, 2, *keys, function=train_while_the_scale_grows)
    assert {line["loss_scale"] for line in expected} == {2**6} and found[-1]["loss_scale"] > 2**6
    for line, other in zip(expected, found, strict=True):
        assert line["loss"] == pytest.approx(other["loss"], rel=2e-3)
        assert line["grad_norm"] == pytest.approx(other["grad_norm"], rel=2e-2)
    for name, tensor in weights.items():
        assert torch.allclose(others[name].float(), tensor.float(), atol=2e-3), name


@pytest.mark.full
def test_norms_of_gpt_oss_are_trained_in_fp32(workers: Callable[[int], WorkerGroup], tmp_path: Path) -> None:
    """As `transformers` has them in fp16, not in bf16."""
    save_family(tmp_path / "hf", "gpt_oss")
    save_tokenizer(tmp_path / "hf")
    records = save_records(tmp_path / "train.jsonl", 40)
    keys = ("precision=fp16", "optimizer=adamw", "learning_rate=1e-3", "logging_steps=1", "save_steps=null")
    workers(2).run(train_in_fp16, Case(tmp_path / "hf", records, tmp_path, 2, 2, STEPS, keys))
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "out/hf"))
    norms = {name for name in after if "norm" in name}
    assert norms and {name for name, tensor in after.items() if tensor.dtype is torch.float32} == norms
    assert all(tensor.dtype is torch.float16 for name, tensor in after.items() if name not in norms)
    assert all(0 < (after[name] - before[name]).abs().max() < 0.1 for name in norms)


def refuse(name: str) -> Any:
    raise AssertionError(f"{name} is not JSON")


@pytest.mark.full
def test_skipped_steps_and_the_loss_scale_are_in_the_metrics(
    workers: Callable[[int], WorkerGroup], tmp_path: Path
) -> None:
    save_llama(tmp_path / "hf", num_hidden_layers=2)
    save_tokenizer(tmp_path / "hf")
    records = save_records(tmp_path / "train.jsonl", 40)
    case = Case(
        tmp_path / "hf", records, tmp_path, 2, 2, STEPS,
        overrides=("precision=fp16", "optimizer=adamw", "learning_rate=1e-3", "logging_steps=1", "save_steps=null"),
    )  # fmt: skip
    workers(2).run(train_in_fp16, case)
    text = (tmp_path / "out" / "metrics.jsonl").read_text()
    lines = [json.loads(line, parse_constant=refuse) for line in text.splitlines()]
    skipped, scales = [line["skipped_steps"] for line in lines], [line["loss_scale"] for line in lines]
    assert skipped[:2] == [1, 1] and 0 in skipped  # a gradient of 0.1 x 2^21 is beyond fp16's 65,504
    assert scales[0] == 2**21 and scales == sorted(scales, reverse=True) and scales[-1] < 2**21
    assert [line["grad_norm"] is None for line in lines] == [bool(count) for count in skipped]
    assert all(0.1 < line["grad_norm"] < 10 for line in lines if line["grad_norm"] is not None)
    assert all(line["loss"] < 6 for line in lines)  # also that of a skipped step


@pytest.mark.full
def test_losses_of_routers_have_the_loss_scale(workers: Callable[[int], WorkerGroup], tmp_path: Path) -> None:
    """The coefficients are so large that they determine the norm. A step that overflows does not count or move a
    bias."""
    save_family(tmp_path / "hf", "deepseek_v3")
    save_tokenizer(tmp_path / "tokenizer")
    records = save_records(tmp_path / "train.jsonl", 60)
    coefficients = {"aux": 20.0, "z": 1.0}
    case = Case(
        tmp_path / "hf", records, tmp_path, 2, 2, STEPS,
        overrides=(
            f"tokenizer_name_or_path={tmp_path}/tokenizer", "precision=fp16", "optimizer=sgd", "learning_rate=1e-7",
            "logging_steps=1", "moe.aux_loss_coef=20", "moe.z_loss_coef=1", "moe.update_router_bias=0.01",
        ),
    )  # fmt: skip
    workers(2).run(train_in_fp16, case, initial_scale_power=18)
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "loss" in line]
    plain = replace(case, overrides=(*case.overrides[:1], "learning_rate=1e-7"))
    with_losses, without = (train_router_oracle(plain, "deepseek_v3", **given)["norms"] for given in (coefficients, {}))
    taken = [number for number, line in enumerate(lines) if line["grad_norm"] is not None]
    assert 0 < len(taken) < STEPS
    for number in taken:
        assert lines[number]["grad_norm"] == pytest.approx(with_losses[number], rel=0.03)
        assert lines[number]["grad_norm"] > 2 * without[number]
    assert ["expert_load_max" in line for line in lines] == [number in taken for number in range(STEPS)]
    exported = load_file(tmp_path / "out" / "hf" / "model.safetensors")
    start = load_file(tmp_path / "hf" / "model.safetensors")
    moved = [(exported[name].float() - start[name]).abs().max().item() for name in start if BIAS in name]
    assert max(moved) == pytest.approx(0.01 * len(taken), rel=1e-3)
