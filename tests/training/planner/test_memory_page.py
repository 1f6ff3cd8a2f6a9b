"""docs/memory.md: its table is what the plan says today."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.configs import build_config
from support.planned import plan_config

from training.cost_terms.table import HOST_BYTES_A_RANK
from training.costs.hardware import GIB
from training.planner.plan import Plan

PAGE = Path(__file__).resolve().parents[3] / "docs" / "memory.md"
COMMON = ("max_seq_length=4096", "micro_batch_size=1", "global_batch_size=64", "plan=true", "model_name_or_path=none")
ROWS = re.findall(r"^\| `(model=.*?)` \| ([\d.]+)(.*?) \| ([\d.]+) \| ([\d,]+) \|$", PAGE.read_text(), re.MULTILINE)


def plan_row(overrides: str) -> Plan:
    config = build_config(*COMMON, *overrides.split())
    return plan_config(config)


@pytest.mark.parametrize(
    ("overrides", "gpu", "fits", "host", "speed"),
    [pytest.param(*row, id=row[0], marks=() if number == 13 else pytest.mark.full) for number, row in enumerate(ROWS)],
)
def test_the_table_is_the_plans(overrides: str, gpu: str, fits: str, host: str, speed: str) -> None:
    plan = plan_row(overrides)
    memory = plan.fullest.memory
    assert (f"{memory.peak / GIB:.1f}", f"{(memory.host - HOST_BYTES_A_RANK) / GIB:.1f}") == (gpu, host)
    assert f"{plan.tokens_per_second:,.0f}" == speed
    assert plan.fits == (fits == "")


def test_there_is_a_table() -> None:
    assert len(ROWS) > 12
