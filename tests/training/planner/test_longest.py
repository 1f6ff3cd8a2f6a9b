"""The longest rows of a plan fit, and rows that are longer by more than its steps do not."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from support.configs import build_config
from support.planned import describe_machine, plan_config

from training.config.schema import RunConfig
from training.plan_command import run
from training.planner.longest import find_longest

KEYS = (
    "model=llama_7b", "world_size=2", "num_stages=2", "micro_batch_size=1", "global_batch_size=8", "plan=true",
    "model_name_or_path=none", "hardware=a100_80g", "adapter=lora",
)  # fmt: skip


def find(config: RunConfig, most: int) -> int | None:
    model, machine = run.resolve_planned(config), describe_machine(config)
    plan = run.build_plan(config, model, machine)
    return find_longest(plan, partial(run.fits_at, plan, model, machine, None), most)


def fits(config: RunConfig, length: int) -> bool:
    return plan_config(replace(config, max_seq_length=length)).fits


@pytest.mark.parametrize("length", [1024, 1_048_576], ids=["from one that fits", "from one that does not"])
def test_longer_rows_do_not_fit(length: int) -> None:
    config = build_config(*KEYS, f"max_seq_length={length}")
    assert fits(config, length) is (length == 1024)
    longest = find(config, 1_048_576)
    assert longest is not None and longest % 1024 == 0
    assert fits(config, longest) and not fits(config, longest + max(1024, longest // 8))


def test_rows_are_no_longer_than_the_model_takes() -> None:
    config = build_config(*KEYS, "max_seq_length=1024")
    assert find(config, 4096) == 4096


def test_nothing_is_said_where_no_row_fits() -> None:
    config = build_config(*KEYS, "max_seq_length=4096", "model=llama_65b", "adapter=none")
    assert find(config, 4096) is None


def test_a_plan_of_layers_resolved_once_is_that_from_the_beginning() -> None:
    """Layers that lend a selection, borrow one, or do neither; at lengths with and without one."""
    layers = ("model.num_hidden_layers=6", "model.indexer_types=[full,full,full,shared,shared,full]")
    config = build_config(*KEYS, "model=glm_5_2", *layers, "adapter.target_parameters=[]", "max_seq_length=1024")
    machine, described = describe_machine(config), run.describe_model(config)
    model = run.resolve_planned(config, described)
    run.build_plan(config, model, machine)
    for length in (1024, 4096):
        other = replace(config, max_seq_length=length)
        found, expected = run.build_plan(other, model, machine), run.plan_config(other, machine, described)
        assert found.costs == expected.costs and len({cost.bytes.lent for cost in found.costs}) == 1 + (length > 2048)
        assert [stage.memory for stage in found.stages] == [stage.memory for stage in expected.stages]
