"""A selection of keys is in the time and the FLOPs of a forward pass, and once more where its layer is recomputed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.configs import build_config
from test_cost_terms import GPU, LAYER, M

from models.layers.selection_cost import SelectionCost
from training.cost_terms.activations import compute_kept
from training.cost_terms.cost_term import PlannedRun, Stage
from training.distributed.topology import Layout, Topology
from training.planner.plan import Plan, compute_plan

TOKENS = 100  # of a micro-batch, a row
MADE = SelectionCost(score_flops=2 * 10**12, projection_flops=10**12, num_chunks=2, moved_bytes=3 * 10**12)
SECONDS = 2 + 1 + MADE.moved_bytes / GPU.stream_rate  # at 1e12 FLOP/s


def plan(selection: SelectionCost | None, interval: int = 0) -> Plan:
    keys = ("precision=bf16", "num_stages=2", f"max_seq_length={TOKENS}", f"activation_checkpoint_interval={interval}")
    run = PlannedRun(build_config(*keys), Layout(Topology.of(4, pipe=2), 1, M), 50, GPU)
    return compute_plan([replace(LAYER, selection=selection)] * 4, [0, 2, 4], run)


@pytest.mark.parametrize("interval", [0, 1], ids=["kept", "recomputed"])
def test_it_is_made_in_each_forward_pass(interval: int) -> None:
    plain, found = plan(None, interval).stages, plan(MADE, interval).stages
    for before, after, again in zip(plain, found, (2 * interval, interval), strict=True):  # the last layer has the loss
        forward, backward = (
            getattr(after.cost, name) - getattr(before.cost, name) for name in ("forward_seconds", "backward_seconds")
        )
        assert forward == pytest.approx(2 * SECONDS, rel=1e-3)
        assert backward == pytest.approx(again * SECONDS, rel=1e-3, abs=1e-9)
        assert after.cost.selection_seconds == pytest.approx((2 + again) * SECONDS, rel=1e-3)
        per_token = after.cost.forward_flops - before.cost.forward_flops
        assert per_token == pytest.approx(2 * (MADE.score_flops + MADE.projection_flops) / TOKENS)


@pytest.mark.parametrize(
    ("mode", "interval", "is_kept"),
    [
        *(("grouped", interval, interval in (1, 2)) for interval in (0, 1, 2, 4)),
        *(("every", interval, interval == 2) for interval in (2, 5)),
    ],
)
def test_it_is_kept_for_a_group_that_is_recomputed_and_begins_with_a_layer_that_takes_it(
    mode: str, interval: int, is_kept: bool
) -> None:
    """A layer that selects, three that take its selection, and another one."""
    keys = (f"activation_checkpoint_interval={interval}", f"activation_checkpoint_mode={mode}")
    run = PlannedRun(build_config("precision=bf16", *keys), Layout(Topology.of(2, pipe=2), 1, M), 50, GPU)
    borrower, made = replace(LAYER, selection=SelectionCost(mask_bytes=1)), SelectionCost(selected_bytes=1000)
    kept = []
    for lent in (0, 1000):
        lender = replace(LAYER, bytes=replace(LAYER.bytes, lent=lent), selection=made)
        chunk = Stage(run, 0, [lender, borrower, borrower, borrower, LAYER], [range(5)]).chunks[0]
        kept.append(compute_kept(chunk).activations)
    assert kept[1] - kept[0] == 1000 * is_kept


def test_a_layer_that_reuses_a_selection_takes_no_time_for_it() -> None:
    shared = plan(SelectionCost(mask_bytes=10**6))
    assert [stage.cost.selection_seconds for stage in shared.stages] == [0, 0]
    assert shared.step_seconds == plan(None).step_seconds
