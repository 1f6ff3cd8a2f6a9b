"""What an optimizer keeps is declared, or the run does not start."""

from __future__ import annotations

import pytest
import torch
from support.configs import build_config

from errors import UserError
from training.engine import optimizer
from training.engine.optimizer import STATE_KINDS, StateKind, check_optimizer, check_state

KEPT = STATE_KINDS[torch.optim.AdamW]


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_the_optimizers_of_a_run_keep_what_is_declared(name: str) -> None:
    check_optimizer(build_config(f"optimizer={name}"))


@pytest.mark.parametrize(
    "declared, saves",
    [
        ({**KEPT, "max_exp_avg_sq": StateKind.elementwise}, "max_exp_avg_sq (elementwise)"),
        ({**KEPT, "step": StateKind.elementwise}, "step (elementwise)"),
        ({"exp_avg": StateKind.elementwise}, "a checkpoint saves exp_avg (elementwise);"),
        ({}, "a checkpoint saves nothing;"),
    ],
    ids=["one more", "of another kind", "one less", "none"],
)
def test_a_run_whose_optimizer_keeps_something_else_does_not_start(
    declared: dict[str, StateKind], saves: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(optimizer.STATE_KINDS, torch.optim.AdamW, declared)
    with pytest.raises(UserError) as raised:
        check_optimizer(build_config("optimizer=adamw"))
    found = "for each parameter the optimizer keeps exp_avg (elementwise), exp_avg_sq (elementwise), step (scalar), but"
    assert str(raised.value).startswith(found) and saves in str(raised.value)


@pytest.mark.parametrize("value, kind", [(torch.zeros(2, 2), "of shape [2, 2]"), (1, "int")])
def test_state_of_an_unknown_shape_is_named(value: object, kind: str) -> None:
    with pytest.raises(UserError, match="keeps scales") as raised:
        check_state(torch.zeros(4), {"scales": value}, {"scales": StateKind.elementwise})
    assert f"scales ({kind})" in str(raised.value)
