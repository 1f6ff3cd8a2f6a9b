"""The objectives on preferences in the tables: their keys, what they refuse, what they score, and their plans."""

from __future__ import annotations

from dataclasses import fields

import pytest
from support.configs import build_config, set_keys
from support.planned import build_small_plan

from data.encoders.kinds import KINDS
from errors import UserError
from extensions.preferences.cpo import CPOFormula
from extensions.preferences.dpo import DPOFormula
from extensions.preferences.keys import DPOLossType
from extensions.preferences.orpo import OddsRatioFormula
from extensions.preferences.pairs import PairFormula, PreferenceObjective, WithNLL
from extensions.preferences.simpo import SimPOFormula
from training.config.schema import RunConfig
from training.objectives.objective import Objective, PassOver
from training.objectives.registry import (
    OBJECTIVES,
    check_objective,
    describe_objective,
    get_objective,
    is_trained_on,
)


@pytest.fixture(scope="module")
def usual() -> RunConfig:
    """The default config; `set_keys` changes copies, which is faster than composing."""
    return build_config()


def test_the_plan_counts_a_forward_pass_before_each_step() -> None:
    dpo, kto = build_small_plan("data=preference"), build_small_plan("data=preference", "task=kto")
    assert [stage.cost.forward_flops for stage in kto.stages] == [2 * stage.cost.forward_flops for stage in dpo.stages]
    assert [stage.cost.backward_flops for stage in kto.stages] == [stage.cost.backward_flops for stage in dpo.stages]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("task=simpo", "data=chat"), "task=simpo and data=chat do not go together; give data=preference, or task=sft"),
        (
            ("task=pretrain", "data=preference"),
            "task=pretrain and data=preference do not go together; give data=pretrain, or task=dpo or task=orpo or "
            "task=simpo or task=cpo",
        ),
    ],
)
def test_what_does_not_go_with_preferences(usual: RunConfig, overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_objective(set_keys(usual, *overrides))


def test_the_reference_scores_answers_and_mismatched_ones_for_kto(usual: RunConfig) -> None:
    for task, pass_over, companion in (("kto", PassOver.companions, "mismatched"), ("dpo", None, "")):
        config = set_keys(usual, "data=preference", f"task={task}")
        objective = get_objective(config)
        assert objective.pass_over(config) is pass_over and objective.companion == companion
        assert [column.name for column in objective.scored] == ["reference"]


PREFERENCES = [objective for objective in OBJECTIVES.values() if is_trained_on(objective, KINDS["preference"])]


@pytest.mark.parametrize("objective", PREFERENCES, ids=lambda objective: objective.name)
def test_every_key_of_a_preference_objective_is_kept_by_a_resume(usual: RunConfig, objective: Objective) -> None:
    config = set_keys(usual, "data=preference", f"task={objective.name}")
    described = describe_objective(config)
    for key in fields(getattr(config, objective.name)):
        value = getattr(getattr(config, objective.name), key.name)
        other = 0.25 if isinstance(value, float) else next(each for each in type(value) if each is not value).name
        name = f"{objective.name}.{key.name}"
        changed = describe_objective(set_keys(config, f"{name}={other}"))
        assert changed == described | {name: str(other)} != described


@pytest.mark.parametrize(
    ("overrides", "formula"),
    [
        (("task=dpo", "dpo.beta=0.2"), DPOFormula(0.2)),
        (("task=dpo", "dpo.loss_type=hinge"), DPOFormula(0.1, 0.0, DPOLossType.hinge)),
        (("task=dpo", "dpo.label_smoothing=0.3"), DPOFormula(0.1, 0.3)),
        (("task=dpo", "dpo.sft_coef=0.4"), WithNLL(DPOFormula(0.1), 0.4)),
        (("task=orpo", "orpo.beta=0.2"), WithNLL(OddsRatioFormula(0.2), 1.0)),
        (("task=simpo", "simpo.beta=3", "simpo.gamma=0.2"), SimPOFormula(3.0, 0.2)),
        (("task=simpo", "simpo.sft_coef=0.4"), WithNLL(SimPOFormula(2.0, 0.5), 0.4)),
        (("task=cpo", "cpo.beta=0.2", "cpo.alpha=0"), CPOFormula(0.2)),
        (("task=cpo", "cpo.alpha=0.4"), WithNLL(CPOFormula(0.1), 0.4)),
        (("task=cpo", "cpo.nll_reduction=sum"), WithNLL(CPOFormula(0.1), 1.0, per_token=False)),
    ],
)
def test_every_key_of_a_preference_objective_reaches_its_formula(
    usual: RunConfig, overrides: tuple[str, ...], formula: PairFormula
) -> None:
    config = set_keys(usual, "data=preference", *overrides)
    objective = get_objective(config)
    assert isinstance(objective, PreferenceObjective) and objective.build_formula(config) == formula
    assert bool(objective.scored) == formula.needs_reference


def test_a_run_from_before_the_sft_term_continues(usual: RunConfig) -> None:
    assert describe_objective(set_keys(usual, "data=preference")) == {
        "dpo.beta": "0.1",
        "dpo.label_smoothing": "0",
        "dpo.loss_type": "sigmoid",
    }


@pytest.mark.parametrize("task", ["orpo", *(pytest.param(task, marks=pytest.mark.full) for task in ("simpo", "cpo"))])
def test_the_plan_of_pairs_is_that_of_dpo(task: str) -> None:
    """Two rows per pair, and logits that are computed twice."""
    plan, usual = (build_small_plan("data=preference", f"task={each}") for each in (task, "dpo"))
    assert plan.stages == usual.stages and plan.tokens_per_step == usual.tokens_per_step
