"""docs/performance.md has what `benchmarks/launches.py` counts of a layer."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.launches import build_contenders, count, tabulate

PAGE = Path(__file__).resolve().parents[1] / "docs" / "performance.md"


@pytest.mark.full
def test_the_table_is_what_is_counted() -> None:
    rows, _ = tabulate("llama_8b", tokens=4000, rank=16, documents=32, hardware_name="h100")
    page = PAGE.read_text(encoding="utf-8")
    assert len(rows) == 7
    assert [row for row in rows if row not in page] == []


def test_a_layer_is_counted() -> None:
    """Also where the plan's stand-in for attention, which it counts by, takes other arguments."""
    contenders, config = build_contenders("llama_8b", rank=16, documents=32)
    forward, backward = count(contenders["frozen"], config.hidden_size, tokens=400)
    assert forward.operators["attention"] == backward.operators["attention"] == 1
    # Seven projections; of a frozen one the gradient of its inputs alone
    assert forward.operators["mm"] == backward.operators["mm"] == 7
