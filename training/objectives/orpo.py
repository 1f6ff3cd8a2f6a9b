"""Odds ratio preference optimization (2403.07691): fine-tuning on the chosen answer and a preference, in one step."""

from __future__ import annotations

from models.losses.orpo import OddsRatioFormula
from models.losses.pairs import PairFormula, WithNLL
from training.config.schema import RunConfig
from training.objectives.preference import PreferenceObjective, check_more_than_zero


class ORPO(PreferenceObjective):
    name = "orpo"

    def check(self, config: RunConfig) -> None:
        check_more_than_zero("orpo.beta", config.orpo.beta)

    def build_formula(self, config: RunConfig) -> PairFormula:
        return WithNLL(OddsRatioFormula(config.orpo.beta), coefficient=1.0)
