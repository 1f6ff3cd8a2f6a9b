"""The remedies that a plan that does not fit names make it fit."""

from __future__ import annotations

import pytest
from support.configs import build_config
from support.planned import build_planner

from training.planner.remedies import find_remedies
from training.planner.report import render_verdict

KEYS = (
    "model=llama_7b",
    "world_size=1",
    "num_stages=1",
    "max_seq_length=2048",
    "micro_batch_size=1",
    "plan=true",
    "global_batch_size=8",
)


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
    config = build_config(*KEYS, "model_name_or_path=none", *keys)
    build = build_planner(config)
    plan = build(config)
    remedies = find_remedies(plan, config, build)
    assert not plan.fits and all(remedy.plan.fits for remedy in remedies)
    assert [remedy.overrides for remedy in remedies] == expected
    verdict = render_verdict(plan, config, remedies)[-1]
    assert verdict.startswith("would fit with " if expected else "change: ")


def test_a_full_host_gets_no_more() -> None:
    """A full host gives back what the GPU has room for, and no offloading is named that it has no room for."""
    keys = (*KEYS, "model_name_or_path=none", "hardware=h200", "offload_optimizer=cpu", "hardware.host_memory=100")
    config = build_config(*keys)
    build = build_planner(config)
    plan = build(config)
    assert plan.missing_host_memory > 0 > plan.missing_memory
    assert "offload_optimizer=none" in [remedy.overrides for remedy in find_remedies(plan, config, build)]
    assert render_verdict(plan, config)[-1] == (
        "change: offload_optimizer=none; fewer ranks on each node; or let plan=search look"
    )
    for host, is_named in ((4, False), (100, False), (1000, True)):  # GiB
        config = build_config(
            *KEYS, "model_name_or_path=none", "hardware=a100_40g", f"hardware.host_memory={host}", "precision=fp32"
        )
        plan = build_planner(config)(config)
        assert plan.missing_memory > 0
        assert ("offload_optimizer=cpu" in render_verdict(plan, config)[-1]) == is_named


def test_several_keys_where_one_does_not_do() -> None:
    keys = (
        "model=llama_7b",
        "world_size=2",
        "num_stages=1",
        "max_seq_length=2048",
        "micro_batch_size=1",
        "plan=true",
        "global_batch_size=8",
    )
    given = ("hardware=a100_80g", "hardware.memory=48", "activation_checkpoint_interval=0", "model_name_or_path=none")
    config = build_config(*keys, *given)
    build = build_planner(config)
    (remedy,) = find_remedies(build(config), config, build)
    assert remedy.plan.fits
    assert remedy.overrides == (
        "activation_checkpoint_interval=1 activation_checkpoint_mode=grouped offload_optimizer=cpu"
    )
