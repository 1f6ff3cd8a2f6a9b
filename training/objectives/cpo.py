"""Contrastive preference optimization (2401.08417): a preference without a reference, and fine-tuning on the chosen
answer."""

from __future__ import annotations

from models.losses.cpo import CPOFormula
from models.losses.options import NLLReduction
from models.losses.pairs import PairFormula, WithNLL
from training.config.schema import RunConfig
from training.objectives.preference import PreferenceObjective, check_coefficient, check_more_than_zero


class CPO(PreferenceObjective):
    name = "cpo"

    def check(self, config: RunConfig) -> None:
        check_more_than_zero("cpo.beta", config.cpo.beta)
        check_coefficient("cpo.alpha", config.cpo.alpha)

    def build_formula(self, config: RunConfig) -> PairFormula:
        cpo = config.cpo
        formula = CPOFormula(cpo.beta)
        return WithNLL(formula, cpo.alpha, cpo.nll_reduction is NLLReduction.mean) if cpo.alpha else formula
