"""Contrastive preference optimization (2401.08417): DPO with a uniform reference, plus SFT on the chosen answer.

    loss = -log sigmoid(beta log p(y_w|x) - beta log p(y_l|x)) - alpha log p(y_w|x)          alpha is 1 in the paper

In the first term, equation 3, log-probabilities are sums over an answer's tokens. The second is `WithNLL`. In the paper
it is the same sum, with a gradient about ten times that of the first term (beta is 0.1); the authors' code takes a mean
over the tokens of a micro-batch, as trl does with `cpo_alpha`. `nll_reduction` chooses the sum, or the mean over the
tokens of each answer. Rewards are beta log p.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.nn import functional as F

from extensions.preferences.keys import CPOConfig, NLLReduction
from extensions.preferences.pairs import PairFormula, Pairs, PairTerms, PreferenceObjective, WithNLL
from training.config.schema import RunConfig


@dataclass(frozen=True)
class CPOFormula:
    """The first term: equation 3 of 2401.08417."""

    beta: float

    needs_reference = False
    reported = ()

    def __call__(self, pairs: Pairs) -> PairTerms:
        rewards = self.beta * pairs.policy
        return PairTerms(-F.logsigmoid(rewards[0] - rewards[1]), rewards)


class CPO(PreferenceObjective):
    name = "cpo"

    def build_formula(self, config: RunConfig) -> PairFormula:
        cpo = config.read_group(CPOConfig)
        formula = CPOFormula(cpo.beta)
        return WithNLL(formula, cpo.alpha, cpo.nll_reduction is NLLReduction.mean) if cpo.alpha else formula
