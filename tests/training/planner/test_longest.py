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


def fits(config: RunConfig, length: int) -> bool:
    return plan_config(replace(config, max_seq_length=length)).fits


@pytest.mark.parametrize("length", [1024, 1_048_576], ids=["from one that fits", "from one that does not"])
def test_longer_rows_do_not_fit(length: int) -> None:
    config = build_config(*KEYS, f"max_seq_length={length}")
    build = partial(run.plan_config, machine=describe_machine(config))
    assert fits(config, length) is (length == 1024)
    longest = find_longest(plan_config(config), build, 1_048_576)
    assert longest is not None and longest % 1024 == 0
    assert fits(config, longest) and not fits(config, longest + max(1024, longest // 8))


def test_rows_are_no_longer_than_the_model_takes() -> None:
    config = build_config(*KEYS, "max_seq_length=1024")
    build = partial(run.plan_config, machine=describe_machine(config))
    assert find_longest(plan_config(config), build, 4096) == 4096


def test_nothing_is_said_where_no_row_fits() -> None:
    config = build_config(*KEYS, "max_seq_length=4096", "model=llama_65b", "adapter=none")
    build = partial(run.plan_config, machine=describe_machine(config))
    assert find_longest(plan_config(config), build, 4096) is None
