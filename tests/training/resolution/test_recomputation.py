"""`activation_checkpoint_interval=auto`: the least recomputation whose plan fits with a margin; 1 without a description
of the GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.configs import build_config
from support.planned import build_planner, describe_machine, plan_config
from support.tiny import save_llama, save_tokenizer

from training import setup
from training.config.schema import CheckpointMode, RunConfig
from training.costs.hardware import GIB
from training.distributed.ranks import Ranks
from training.plan_command.run import plan_run
from training.resolution.recomputation import CHOICES, MARGIN, Choice, choose_recomputation
from training.setup import check_run

LORA_8B = (
    "model=llama_3_1_8b", "model_name_or_path=none", "adapter=lora", "precision=bf16", "plan=true", "num_stages=1",
    "world_size=1", "hardware=h100", "micro_batch_size=1", "global_batch_size=8",
)  # fmt: skip
AUTO = "activation_checkpoint_interval=auto"


def read_choice(config: RunConfig) -> Choice:
    return config.activation_checkpoint_mode, config.activation_checkpoint_interval


@pytest.mark.parametrize("length", [1024, 8192, 32768, 131072])
def test_the_first_choice_whose_plan_leaves_the_margin_is_taken(length: int) -> None:
    config = build_config(*LORA_8B, f"max_seq_length={length}", "compile=true", AUTO)
    plan, machine = build_planner(config), describe_machine(config)
    keys = [replace(config, activation_checkpoint_mode=m, activation_checkpoint_interval=n) for m, n in CHOICES]
    peaks = [plan(each).fullest.memory.peak for each in keys]
    limit = (1 - MARGIN) * machine.usable_bytes
    expected = next((number for number, peak in enumerate(peaks) if peak <= limit), len(CHOICES) - 1)
    planned = plan(config)
    assert planned.fullest.memory.peak == peaks[expected]


def test_lengths_of_the_test_above_take_different_choices() -> None:
    found = [next(plan_run(build_config(*LORA_8B, f"max_seq_length={n}", AUTO))) for n in (1024, 131072)]
    assert found[0].startswith(f"{AUTO}: 0, ") and found[0].endswith("GiB on the fullest GPU by the plan")
    assert found[1].startswith(f"{AUTO}: 1, ") and "5% stay free, so not 0 " in found[1]


@pytest.mark.parametrize(
    ("peaks", "expected"),
    [((94, 1, 1, 1, 1), 0), ((96, 94, 1, 1, 1), 1), ((200, 150, 120, 90, 60), 3), ((200, 150, 120, 110, 99), 4)],
)
def test_the_margin_is_of_the_usable_memory(peaks: tuple[int, ...], expected: int) -> None:
    machine = replace(describe_machine(build_config(*LORA_8B, AUTO)), memory=100.0, usable_memory=1.0)
    bytes_of = {choice: peak * GIB for choice, peak in zip(CHOICES, peaks, strict=True)}
    choice, line = choose_recomputation(machine, bytes_of.__getitem__, lambda choice: False)
    assert choice == CHOICES[expected]
    assert f"{peaks[expected]}.0 of 100.0 GiB" in line


def test_choices_that_are_refused_are_left_out() -> None:
    config = build_config(*LORA_8B, "max_seq_length=1024", AUTO, "activation_offload=true")
    line = next(plan_run(config))  # offloading needs an interval
    assert line.startswith(AUTO) and not line.startswith(f"{AUTO}: 0") and "not 0" not in line


@pytest.mark.parametrize("compiles", [False, True])
def test_selective_is_not_taken_where_the_host_would_be_its_limit(compiles: bool) -> None:
    """With memory for `selective` and no more: compiled it is taken; operator by operator the host would launch what it
    runs again more slowly than the GPU runs it."""
    keys = (*LORA_8B, "adapter=none", "hardware=h200", "max_seq_length=2048", f"compile={str(compiles).lower()}")
    selective = ("activation_checkpoint_interval=1", "activation_checkpoint_mode=selective")
    peak, whole = (
        plan_config(build_config(*keys, *more)).fullest.memory.peak
        for more in (selective, ("activation_checkpoint_interval=0",))
    )
    memory = 1.001 * peak / (1 - MARGIN) / GIB
    assert memory * (1 - MARGIN) * GIB < whole
    line = next(plan_run(build_config(*keys, AUTO, f"hardware.memory={memory}", "hardware.usable_memory=1")))
    assert line.startswith(f"{AUTO}: 1 (selective), ") == compiles
    assert ("; not 1 (selective), which the host launches more slowly than the GPU runs it" in line) != compiles


def test_a_run_says_what_it_took(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_llama(tmp_path / "hf")
    save_tokenizer(tmp_path / "hf")
    config = build_config(
        f"model_name_or_path={tmp_path}/hf", f"output_dir={tmp_path}/out", "micro_batch_size=1",
        "global_batch_size=4", "num_stages=2", "precision=bf16", AUTO,
    )  # fmt: skip
    ranks = Ranks(rank=0, world_size=4, local_rank=0, local_size=4)
    without = check_run(config, ranks)
    assert (read_choice(without.config), without.checkpointing.interval) == ((CheckpointMode.grouped, 1), 1)
    assert without.recomputation == f"{AUTO}: 1, as no file of conf/hardware describes this device"
    monkeypatch.setattr(setup, "has_accelerator", lambda: True)
    monkeypatch.setattr(setup, "describe_device", lambda: "NVIDIA H100 80GB HBM3")
    found = check_run(config, ranks)
    assert (read_choice(found.config), found.checkpointing.interval) == ((CheckpointMode.grouped, 0), 0)
    assert found.recomputation is not None and found.recomputation.startswith(f"{AUTO}: 0, 0.")
