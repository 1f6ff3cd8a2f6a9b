"""Direct preference optimization (2305.18290): a loss over pairs of answers, against what a reference model thinks of
them.

Of a pair with prompt x, chosen answer y_w and rejected answer y_l, with the policy p trained and the reference r fixed,

    h = (log p(y_w|x) - log r(y_w|x)) - (log p(y_l|x) - log r(y_l|x))

    sigmoid    -(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h)
               The paper's; e: label_smoothing, the share of labels that are taken to be wrong ("conservative DPO").
               Log-probabilities are sums over the answer's tokens.
    ipo        (h - 1 / (2 beta))^2
               2310.12036, equation 17; its tau is beta. Log-probabilities are means over the answer's tokens, as in trl
               and as its authors advise: with sums the target 1 / (2 beta) would mean another thing for each length.

Rewards are beta (log p - log r), of the same sums or means. B pairs in a micro-batch; rows 2 i and 2 i + 1 are chosen
and rejected.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F
from transformers import PretrainedConfig

from models.losses.cross_entropy import find_targets, get_softcap, sequence_log_probabilities
from models.losses.logit_pieces import shard_vocabulary
from models.losses.options import DPOLossType
from models.parallel.shard import ALONE, TensorParallel

METRICS = ("rewards_chosen", "rewards_rejected", "rewards_margin", "rewards_accuracy")


class DPOLoss:
    """The loss of the last stage. It also adds up the rewards of all pairs that it has seen, until `take_totals` takes
    them.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        beta: float,
        *,
        label_smoothing: float = 0.0,
        loss_type: DPOLossType = DPOLossType.sigmoid,
        parallel: TensorParallel = ALONE,
    ) -> None:
        self._softcap, self._sharing = get_softcap(config), shard_vocabulary(config, parallel)
        self._beta, self._label_smoothing, self._loss_type = beta, label_smoothing, loss_type
        self._totals: torch.Tensor | None = None

    def __call__(self, outputs: tuple[torch.Tensor, torch.Tensor], targets: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """outputs: as in `causal_lm_loss`. targets: target tokens [2 B, T]; the reference's log-probability of each
        row, summed over its targets, float64 [2 B]; `loss_denominator`, scalar; and `target_indices`, see
        `find_targets`. A pair without targets fills a batch and counts for nothing.

        Returns the sum of the pairs' losses over the denominator, fp32 at least.
        """
        target_ids, reference, loss_denominator, *known = targets
        policy, num_targets = sequence_log_probabilities(  # [2 B]
            outputs, target_ids, find_targets(target_ids, *known), self._softcap, self._sharing
        )
        is_pair = num_targets[::2] > 0  # [B]
        log_ratios = policy - reference
        if self._loss_type is DPOLossType.ipo:
            log_ratios = log_ratios / num_targets.clamp(min=1)
        h = log_ratios[::2] - log_ratios[1::2]  # [B]
        if self._loss_type is DPOLossType.ipo:
            losses = (h - 1 / (2 * self._beta)).square()
        else:
            smoothing = self._label_smoothing
            losses = -(1 - smoothing) * F.logsigmoid(self._beta * h) - smoothing * F.logsigmoid(-self._beta * h)
        self._add(self._beta * log_ratios.detach(), is_pair)
        return ((losses * is_pair).sum() / loss_denominator).to(torch.promote_types(outputs[1].dtype, torch.float32))

    def _add(self, rewards: torch.Tensor, is_pair: torch.Tensor) -> None:
        chosen, rejected = rewards[::2], rewards[1::2]
        of_pairs = torch.stack(
            [chosen, rejected, chosen - rejected, (chosen > rejected).double(), torch.ones_like(chosen)]
        )
        totals = (of_pairs * is_pair).sum(dim=1)
        self._totals = totals if self._totals is None else self._totals + totals

    def take_totals(self) -> torch.Tensor | None:
        """The sums of METRICS over the pairs since the last call, and the number of pairs: float64 [5]; None when there
        were none.
        """
        totals, self._totals = self._totals, None
        return totals


class RowScore:
    """In place of a loss: the log-probability of each row's targets, float64 [B]. targets: target tokens, and what is
    not needed.
    """

    def __init__(self, config: PretrainedConfig, parallel: TensorParallel = ALONE) -> None:
        self._softcap, self._sharing = get_softcap(config), shard_vocabulary(config, parallel)

    def __call__(self, outputs: tuple[torch.Tensor, torch.Tensor], targets: tuple[torch.Tensor, ...]) -> torch.Tensor:
        target_ids, _, *known = targets
        log_probabilities, _ = sequence_log_probabilities(
            outputs, target_ids, find_targets(target_ids, *known), self._softcap, self._sharing
        )
        return log_probabilities
