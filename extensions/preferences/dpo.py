"""Direct preference optimization (2305.18290): pairs of answers, relative to a reference model.

For a pair with prompt x, chosen answer y_w and rejected answer y_l, with the policy p trained and the reference r
fixed,

    h = (log p(y_w|x) - log r(y_w|x)) - (log p(y_l|x) - log r(y_l|x))

    sigmoid    -(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h)
               The paper's. e: label_smoothing, the assumed share of wrong labels ("conservative DPO").
    hinge      max(0, 1 - beta h)
               SLiC (2305.10425) in the form of 2309.06657: no gradient beyond a margin of 1 / beta.
    robust     (-(1 - e) log sigmoid(beta h) + e log sigmoid(-beta h)) / (1 - 2 e)
               2403.00409: an unbiased estimate of the loss of clean labels where a share e is flipped. It may be
               negative.
    ipo        (h - 1 / (2 beta))^2
               2310.12036, equation 17; its tau is beta. Log-probabilities are means over the answer's tokens, as in trl
               and as its authors advise: with sums the target 1 / (2 beta) would depend on the length.

Except for ipo, log-probabilities are sums over an answer's tokens. Rewards are beta (log p - log r), of the same sums
or means.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from extensions.preferences.keys import DPOConfig, DPOLossType
from extensions.preferences.pairs import PairFormula, Pairs, PairTerms, PreferenceObjective, WithNLL
from extensions.preferences.reference import REFERENCE, build_answer_scorer
from training.config.schema import RunConfig
from training.objectives.objective import LastStage, Scorer


@dataclass(frozen=True)
class DPOFormula:
    """DPO (2305.18290) or one of its variants above."""

    beta: float
    label_smoothing: float = 0.0
    loss_type: DPOLossType = DPOLossType.sigmoid

    needs_reference = True
    reported = ()

    def __call__(self, pairs: Pairs) -> PairTerms:
        assert pairs.reference is not None
        log_ratios = pairs.policy - pairs.reference  # [2, B]
        if self.loss_type is DPOLossType.ipo:
            log_ratios = log_ratios / pairs.num_tokens
        return PairTerms(self._compute_losses(log_ratios[0] - log_ratios[1]), self.beta * log_ratios)

    def _compute_losses(self, h: torch.Tensor) -> torch.Tensor:
        if self.loss_type is DPOLossType.ipo:
            return (h - 1 / (2 * self.beta)).square()
        if self.loss_type is DPOLossType.hinge:
            return torch.relu(1 - self.beta * h)
        smoothing = self.label_smoothing
        preferred, flipped = -F.logsigmoid(self.beta * h), -F.logsigmoid(-self.beta * h)
        if self.loss_type is DPOLossType.robust:
            return ((1 - smoothing) * preferred - smoothing * flipped) / (1 - 2 * smoothing)
        return (1 - smoothing) * preferred + smoothing * flipped


class DPO(PreferenceObjective):
    name = "dpo"
    scored = (REFERENCE,)

    def build_scorer(self, config: RunConfig, stage: LastStage) -> Scorer:
        return build_answer_scorer(stage, self.group_size(config.data))

    def identity(self, config: RunConfig) -> dict[str, str]:
        """Return its keys, without `sft_coef` if it is off: checkpoints from before that key existed continue."""
        return {key: value for key, value in super().identity(config).items() if (key, value) != ("dpo.sft_coef", "0")}

    def build_formula(self, config: RunConfig) -> PairFormula:
        dpo = config.read_group(DPOConfig)
        formula = DPOFormula(dpo.beta, dpo.label_smoothing, dpo.loss_type)
        return WithNLL(formula, dpo.sft_coef) if dpo.sft_coef else formula
