"""A run whose ranks hold parts of gradients, weights or experts continues at any other layout, and the other way."""

from __future__ import annotations

import pytest
from support.cases import CONTEXT_PARALLEL
from support.resuming import EXPERTS, KINDS, LAYOUTS, SHARDED, TENSOR_PARALLEL, check_continues

EXPERT_PAIRS = [
    ("tp2", "pp2"),
    ("pp2", "tp2"),
    ("pp1xdp2", "tp2xpp2"),
    ("pp4", "pp1xdp2"),
    ("tp2xpp2", "pp1"),
]
SHARDED_PAIRS = [
    ("stage3xdp2", "pp2"), ("pp2", "stage3xdp2"), ("stage2xdp2", "pp2"), ("pp2", "stage2xdp2"),
    ("stage3xdp4", "stage2xdp2"), ("stage2xdp2", "stage3xdp4"), ("pp4", "stage3xdp4"), ("stage3xdp2", "pp2xdp2"),
    ("stage2xpp2xdp2", "stage3xdp2"), ("stage2xdp4", "stage2xpp2xdp2"), ("stage2xpp2xdp2", "pp1"),
    ("stage1xdp4 by 2", "pp2"), ("pp1xdp2", "stage1xdp4 by 2"), ("stage2xdp4 by 2", "stage2xdp4"),
]  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("kind", ["tied", "untied", "lora"])
@pytest.mark.parametrize("saved, resumed", SHARDED_PAIRS, ids=str)
def test_zero_stages_continue_at_other_layouts(run_at, saved: str, resumed: str, kind: str) -> None:
    check_continues(run_at, saved, resumed, kind)


# Every pair of layouts one of which shards more than the optimizer's state, each with one kind of model in turn.
OTHERS = (*LAYOUTS, *TENSOR_PARALLEL, *CONTEXT_PARALLEL)
SHARDED_SIDES = [pair for one in SHARDED for other in OTHERS for pair in ((one, other), (other, one))]
SHARDED_SIDES += [(one, other) for one in SHARDED for other in SHARDED if one != other]


@pytest.mark.full
@pytest.mark.parametrize(
    "saved, resumed, kind",
    [(*pair, list(KINDS)[number % len(KINDS)]) for number, pair in enumerate(SHARDED_SIDES)],
    ids=str,
)
def test_zero_stages_continue_at_every_other_layout(run_at, saved: str, resumed: str, kind: str) -> None:
    check_continues(run_at, saved, resumed, kind)


@pytest.mark.full
@pytest.mark.parametrize("kind", EXPERTS)
@pytest.mark.parametrize("saved, resumed", EXPERT_PAIRS, ids=str)
def test_mixtures_and_their_adapters_continue_at_another_layout(run_at, saved: str, resumed: str, kind: str) -> None:
    check_continues(run_at, saved, resumed, kind)


EXPERT_SIDES = [
    ("ep2", "pp2"), ("pp2", "ep2"), ("ep2", "ep2xpp2"), ("ep2xpp2", "pp1"), ("tp2", "ep2"), ("ep2xcp2", "tp2"),
    ("ep2xtp2", "ep2"), ("pp1xdp2", "ep2xtp2"), ("stage2xep2", "pp2xdp2"), ("ep2xpp2", "stage2xep2"),
    ("ep2xdp2", "pp2"), ("pp1xdp2", "ep2xdp2"),
    ("ep4", "ep2xpp2"), ("ep2", "ep4"), ("tp2", "ep2xcp2"),
]  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("kind", EXPERTS)
@pytest.mark.parametrize("saved, resumed", EXPERT_SIDES, ids=str)
def test_divided_experts_continue_at_every_other_layout(run_at, saved: str, resumed: str, kind: str) -> None:
    check_continues(run_at, saved, resumed, kind)


@pytest.mark.full
@pytest.mark.parametrize(
    "saved, resumed",
    [("ep2", "pp2"), ("pp1xdp2", "ep2xpp2"), ("ep2xpp2", "stage2xep2"), ("stage2xep2xdp2", "pp2"), ("pp2", "ep2xdp2")],
    ids=str,
)
def test_rounded_averages_of_divided_experts_continue(run_at, saved: str, resumed: str) -> None:
    check_continues(run_at, saved, resumed, "experts in bf16")
