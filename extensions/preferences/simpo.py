"""Simple preference optimization (2405.14734): an answer's reward is the mean log-probability of its tokens, with no
reference.

    loss = -log sigmoid(beta / |y_w| log p(y_w|x) - beta / |y_l| log p(y_l|x) - gamma)          equation 6

gamma: the margin by which the reward of the chosen answer should exceed the other. trl's `simpo_gamma` is the same; the
authors' code has gamma / beta as `gamma_beta_ratio`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.nn import functional as F

from extensions.preferences.keys import SimPOConfig
from extensions.preferences.pairs import PairFormula, Pairs, PairTerms, PreferenceObjective, WithNLL
from training.config.schema import RunConfig


@dataclass(frozen=True)
class SimPOFormula:
    """Equation 6 of 2405.14734."""

    beta: float
    gamma: float

    needs_reference = False
    reported = ()

    def __call__(self, pairs: Pairs) -> PairTerms:
        rewards = self.beta * pairs.policy_means
        return PairTerms(-F.logsigmoid(rewards[0] - rewards[1] - self.gamma), rewards)


class SimPO(PreferenceObjective):
    name = "simpo"

    def build_formula(self, config: RunConfig) -> PairFormula:
        simpo = config.read_group(SimPOConfig)
        formula = SimPOFormula(simpo.beta, simpo.gamma)
        return WithNLL(formula, simpo.sft_coef) if simpo.sft_coef else formula
