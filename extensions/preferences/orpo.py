"""Odds ratio preference optimization (2403.07691): fine-tuning on the chosen answer, plus a preference term without a
reference.

With P(y|x) the geometric mean of the probabilities of the answer's tokens (equation 3) and odds = P / (1 - P),

    log odds ratio = log odds(y_w|x) - log odds(y_l|x)
    loss           = -log P(y_w|x) - beta log sigmoid(log odds ratio)          equations 6 and 7; their lambda is beta

The first term is `WithNLL` with a coefficient of 1: a mean over the tokens of the answer, then over pairs. trl
includes the prompts and takes one mean over the tokens of a micro-batch; here as in the paper only answers count.
Rewards are beta log P, as in trl.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from extensions.preferences.keys import ORPOConfig
from extensions.preferences.pairs import PairFormula, Pairs, PairTerms, PreferenceObjective, WithNLL
from training.config.schema import RunConfig

# A mean log-probability closer to 0 is a rounding error in fp32: its odds would be infinite, and their gradient NaN.
NEAREST_TO_CERTAIN = -torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class OddsRatioFormula:
    """The second term: equation 7 of 2403.07691."""

    beta: float

    needs_reference = False
    reported = ("log_odds_ratio", "odds_ratio_loss")

    def __call__(self, pairs: Pairs) -> PairTerms:
        log_odds = compute_log_odds(pairs.policy_means)  # [2, B]
        ratios = log_odds[0] - log_odds[1]
        losses = -F.logsigmoid(ratios)
        reported = {"log_odds_ratio": ratios, "odds_ratio_loss": losses}
        return PairTerms(self.beta * losses, self.beta * pairs.policy_means, reported)


def compute_log_odds(log_probabilities: torch.Tensor) -> torch.Tensor:
    """Return log(P / (1 - P)) for log P, which is at most 0."""
    log_complement = torch.log(-torch.expm1(log_probabilities.clamp(max=NEAREST_TO_CERTAIN)))
    return log_probabilities - log_complement


class ORPO(PreferenceObjective):
    name = "orpo"

    def build_formula(self, config: RunConfig) -> PairFormula:
        orpo = config.read_group(ORPOConfig)
        return WithNLL(OddsRatioFormula(orpo.beta), coefficient=1.0)
