"""A run saved at one layout continues at another as if it had never stopped: losses and gradient norms, on real
processes."""

from __future__ import annotations

import pytest
from support.cases import CONTEXT_PARALLEL
from support.resuming import INDEXED, KINDS, LAYOUTS, OPTIMIZERS, TENSOR_PARALLEL, check_continues

EVERY_PAIR = [(saved, resumed) for saved in LAYOUTS for resumed in LAYOUTS if saved != resumed]
ACROSS = (*TENSOR_PARALLEL, "pp2", "pp1xdp2")
EVERY_PAIR += [
    pair for cp in CONTEXT_PARALLEL for other in ("pp2", "pp1xdp2", "tp2") for pair in ((cp, other), (other, cp))
]
EVERY_PAIR += [("cp2", "cp2xpp2"), ("cp2xpp2", "cp2")]
EVERY_PAIR += [(s, r) for s in ACROSS for r in ACROSS if s != r and {s, r} & TENSOR_PARALLEL.keys()]
OPTIMIZER_PAIRS = [("pp2", "pp1xdp2"), ("pp1xdp2", "tp2"), ("tp2xpp2", "pp1"), ("pp2xdp2", "pp4")]
FEW = [  # off and onto each axis; a tied weight that two stages hold
    ("pp2xdp2", "pp1", "tied"),
    ("pp1", "pp2", "lora"),
    ("tp2", "pp1xdp2", "untied"),
]


@pytest.mark.parametrize("saved, resumed, kind", FEW, ids=str)
def test_another_layout_continues_with_the_same_losses_and_norms(run_at, saved: str, resumed: str, kind: str) -> None:
    check_continues(run_at, saved, resumed, kind)


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("saved, resumed", EVERY_PAIR, ids=str)
def test_every_layout_continues_at_every_other(run_at, saved: str, resumed: str, kind: str) -> None:
    check_continues(run_at, saved, resumed, kind)


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "saved, resumed",
    [
        ("tp2 in parts", "tp2"),
        ("tp2", "tp2 in parts"),
        ("tp2xpp2 in parts", "pp1xdp2"),
        ("pp2", "tp2xpp2 in parts"),
        ("tp2 in parts", "tp2xpp2 in parts"),
    ],
    ids=str,
)
def test_parts_of_sequences_leave_no_trace(run_at, saved: str, resumed: str, kind: str) -> None:
    check_continues(run_at, saved, resumed, kind)


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "saved, resumed",
    [
        ("cp2 in a ring", "cp2"),
        ("cp2", "cp2 in a ring"),
        ("cp2xpp2 in a ring", "pp1xdp2"),
        ("pp2", "cp2xpp2 in a ring"),
        ("tp2", "cp2 in a ring"),
    ],
    ids=str,
)
def test_rings_leave_no_trace(run_at, saved: str, resumed: str, kind: str) -> None:
    check_continues(run_at, saved, resumed, kind)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize(
    "saved, resumed",
    [pytest.param(*pair, marks=pytest.mark.full) for pair in OPTIMIZER_PAIRS],
    ids=str,
)
def test_each_optimizer_continues_at_another_layout(run_at, saved: str, resumed: str, kind: str) -> None:
    check_continues(run_at, saved, resumed, kind)


@pytest.mark.full
@pytest.mark.parametrize("kind", INDEXED)
@pytest.mark.parametrize("saved, resumed", [("pp2", "pp1xdp2"), ("pp1xdp2", "ep2xpp2")], ids=str)
def test_a_frozen_indexer_is_read_back(run_at, saved: str, resumed: str, kind: str) -> None:
    check_continues(run_at, saved, resumed, kind)
