"""Simple preference optimization (2405.14734): rewards are mean log-probabilities, with a margin between them."""

from __future__ import annotations

from models.losses.pairs import PairFormula, WithNLL
from models.losses.simpo import SimPOFormula
from training.config.schema import RunConfig
from training.objectives.preference import PreferenceObjective, check_coefficient, check_more_than_zero


class SimPO(PreferenceObjective):
    name = "simpo"

    def check(self, config: RunConfig) -> None:
        simpo = config.simpo
        check_more_than_zero("simpo.beta", simpo.beta)
        check_coefficient("simpo.gamma", simpo.gamma)
        check_coefficient("simpo.sft_coef", simpo.sft_coef)

    def build_formula(self, config: RunConfig) -> PairFormula:
        simpo = config.simpo
        formula = SimPOFormula(simpo.beta, simpo.gamma)
        return WithNLL(formula, simpo.sft_coef) if simpo.sft_coef else formula
