"""Each row of the table of changes, and each remedy, is the plan of a run with those overrides."""

from __future__ import annotations

import re
from functools import partial

import pytest
from support.configs import build_config
from support.planned import describe_machine, plan_config

from training.config.schema import RunConfig
from training.costs.hardware import GIB
from training.plan_command import run
from training.plan_command.report import render_variants, render_verdict
from training.plan_command.run import resolve_planned
from training.planner.advice import Variant, advise
from training.planner.plan import Plan

KEYS = (
    "model=llama_7b",
    "world_size=1",
    "num_stages=1",
    "max_seq_length=2048",
    "micro_batch_size=1",
    "plan=true",
    "global_batch_size=8",
    "model_name_or_path=none",
)
SMALL = (
    "model=llama_tiny", "model_name_or_path=none", "world_size=2", "hardware=h100", "num_stages=2", "plan=true",
    "max_seq_length=512", "micro_batch_size=2", "global_batch_size=16",
)  # fmt: skip


def advise_config(config: RunConfig) -> tuple[Plan, list[Variant]]:
    plan, layers = plan_config(config), resolve_planned(config).layers
    return plan, advise(config, plan, layers, partial(run.plan_config, machine=describe_machine(config)))


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ((), ["fused_kernels=auto", "compile=true", "activation_checkpoint_interval=auto", "micro_batch_size=4"]),
        (("fused_kernels=auto",), ["activation_checkpoint_interval=auto", "micro_batch_size=4"]),
        (
            ("compile=true", "activation_checkpoint_mode=selective"),
            ["activation_checkpoint_interval=auto activation_checkpoint_mode=grouped", "micro_batch_size=4"],
        ),
        (
            ("global_batch_size=null", "gradient_accumulation_steps=2", "activation_checkpoint_interval=auto"),
            [
                "fused_kernels=auto",
                "compile=true",
                "micro_batch_size=4 gradient_accumulation_steps=null global_batch_size=4",
            ],
        ),
        (("hardware.device=cpu",), []),
    ],
    ids=str,
)
def test_each_row_is_the_plan_with_its_overrides(keys: tuple[str, ...], expected: list[str]) -> None:
    plan, variants = advise_config(build_config(*SMALL, *keys))
    assert [variant.overrides for variant in variants] == expected
    lines = render_variants(plan, variants)
    assert len(lines) == 2 + len(expected)
    for line, overrides in zip(lines[1:], ["", *expected], strict=True):
        found = plan_config(build_config(*SMALL, *keys, *overrides.split()))
        figures = (
            f"{found.tokens_per_second:,.0f}",
            f"{found.fullest.memory.peak / GIB:.1f}",
            f"{found.host_bytes / GIB:,.0f}",
        )
        assert tuple(re.split(r"\s\s+", line.strip())[1:]) == figures


@pytest.mark.parametrize(
    ("keys", "is_named"),
    [
        (("model=llama_tiny",), True),
        (("model=gpt2_xl", "model.n_layer=2"), False),
        (("model=gemma2_27b", "model.num_hidden_layers=2"), True),  # its rotary positions
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_fused_kernels_are_named_where_there_is_one(keys: tuple[str, ...], is_named: bool) -> None:
    _, variants = advise_config(build_config(*SMALL, *keys, "hardware=b300"))
    assert ("fused_kernels=auto" in [variant.overrides for variant in variants]) == is_named


def test_what_was_left_to_auto_is_chosen_anew() -> None:
    """Larger micro-batches, for which what auto has chosen would not fit."""
    kept = "activation_checkpoint_interval=0"
    own, larger = (
        plan_config(build_config(*SMALL, kept, f"micro_batch_size={size}")).fullest.memory.peak / GIB for size in (2, 4)
    )
    keys = ("activation_checkpoint_interval=auto", f"hardware.memory={(own + larger) / 2}", "hardware.usable_memory=1")
    plan, variants = advise_config(build_config(*SMALL, *keys))
    assert plan.run.config.activation_checkpoint_interval == 0
    found = next(variant.plan for variant in variants if variant.overrides == "micro_batch_size=4")
    assert found.fits and found.run.config.activation_checkpoint_interval > 0


def test_a_change_that_does_not_fit_says_so() -> None:
    plan = plan_config(build_config(*SMALL))
    memory = 1.1 * plan.fullest.memory.peak / GIB
    plan, variants = advise_config(build_config(*SMALL, f"hardware.memory={memory}", "hardware.usable_memory=1"))
    larger = next(variant for variant in variants if variant.overrides == "micro_batch_size=4")
    lines = render_variants(plan, variants)
    assert plan.fits and not larger.plan.fits
    assert ["(does not fit)" in line for line in lines[2:]] == [not variant.plan.fits for variant in variants]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (("hardware=a100_80g",), ["offload_optimizer=cpu"]),
        (
            ("hardware=h200", "hardware.memory=118"),
            ["offload_optimizer=cpu", "optimizer.state_dtype=bf16", "optimizer=adamw_8bit"],
        ),
        (("hardware=rtx4090",), []),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else str(len(value)),
)
def test_keys_that_make_it_fit(keys: tuple[str, ...], expected: list[str]) -> None:
    plan, variants = advise_config(build_config(*KEYS, *keys))
    assert not plan.fits and all(variant.plan.fits for variant in variants)
    assert [variant.overrides for variant in variants] == expected
    for variant in variants:
        assert plan_config(build_config(*KEYS, *keys, *variant.overrides.split())).stages == variant.plan.stages
    verdict = "\n".join(render_verdict(plan, variants))
    assert ("it would fit with one of these" in verdict) == bool(expected) != ("change: " in verdict)


def test_a_full_host_gets_no_more() -> None:
    """A full host gives back what the GPU has room for, and no offloading is named that it has no room for."""
    keys = (*KEYS, "hardware=h200", "offload_optimizer=cpu", "hardware.host_memory=100")
    plan, variants = advise_config(build_config(*keys))
    assert plan.missing_host_memory > 0 > plan.missing_memory
    assert "offload_optimizer=none" in [variant.overrides for variant in variants]
    for host, is_named in ((4, False), (1000, True)):  # GiB
        plan, variants = advise_config(build_config(*KEYS, "hardware=a100_80g", f"hardware.host_memory={host}"))
        assert plan.missing_memory > 0
        assert any("offload_optimizer=cpu" in variant.overrides for variant in variants) == is_named


def test_several_keys_where_one_does_not_do() -> None:
    given = ("hardware=a100_80g", "hardware.memory=48", "activation_checkpoint_interval=0", "world_size=2")
    _, (variant,) = advise_config(build_config(*KEYS, *given))
    assert variant.plan.fits
    assert variant.overrides == "activation_checkpoint_interval=1 offload_optimizer=cpu"
