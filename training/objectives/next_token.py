"""Next-token cross entropy, with label smoothing in training and token accuracy in evaluation: SFT and pretraining.
With a teacher (`distill.teacher`), the divergence from its distributions in addition; with `mtp.loss_coef`, the loss of
further tokens."""

from __future__ import annotations

import torch
import torch.distributed as dist
from transformers import PretrainedConfig

from models.further.table import count_trained
from models.losses.cross_entropy import Loss
from models.losses.distill_loss import DistillLoss
from models.losses.divergence import DistillOptions
from models.losses.further_tokens import FurtherTokenLoss
from models.losses.token_loss import TokenLoss
from models.parallel.shard import NO_CP, ContextParallel, TensorParallel
from training.config.incompatible import write_value
from training.objectives.objective import Metrics, Objective, ObjectiveOptions, ReportedMeans


class NextToken(Objective):
    """Mean cross entropy of the target tokens; a user-defined loss may replace it."""

    smooths_labels = True
    predicts_further = True
    distills = True

    def describe(self, options: ObjectiveOptions) -> dict[str, str]:
        values = {"label_smoothing": options.label_smoothing, "mtp.loss_coef": options.mtp_loss_coef}
        described = {key: f"{value:g}" for key, value in values.items() if value}
        if (distill := options.distill) is not None:
            names = ("coef", "temperature", "divergence", "top_k")
            described |= {f"distill.{name}": write_value(getattr(distill, name)) for name in names}
        return described

    def build_loss(
        self,
        options: ObjectiveOptions,
        model_config: PretrainedConfig,
        parallel: TensorParallel,
        sequence_part: ContextParallel = NO_CP,
    ) -> Loss | None:
        if options.is_user_loss:
            return None
        smoothing, counts_correct = options.label_smoothing, options.eval_token_accuracy
        if (keys := options.distill) is not None:
            distill = DistillOptions(keys.coef, keys.temperature, keys.divergence)
            return DistillLoss(model_config, distill, smoothing, counts_correct=counts_correct, parallel=parallel)
        loss = TokenLoss(model_config, smoothing, counts_correct=counts_correct, parallel=parallel)
        num_depths = count_trained(model_config)
        if num_depths == 0:
            return loss
        return FurtherTokenLoss(
            loss, model_config, options.mtp_loss_coef, num_depths, label_smoothing=smoothing, parallel=parallel
        )

    def list_metrics(self, options: ObjectiveOptions) -> tuple[str, ...] | None:
        if options.mtp_loss_coef:
            return None  # one for each depth, which the model knows
        if options.is_user_loss:
            return ()
        distilled = ("distill_loss",) if options.distill is not None else ()
        return (*distilled, *(("token_accuracy",) if options.eval_token_accuracy else ()))

    def build_metrics(self, loss: Loss, device: torch.device) -> Metrics | None:
        if isinstance(loss, DistillLoss):
            return ReportedMeans(loss, device)
        if isinstance(loss, FurtherTokenLoss):
            accuracy = self.build_metrics(loss.next_token, device)
            return BothMetrics(ReportedMeans(loss, device), accuracy) if accuracy else ReportedMeans(loss, device)
        return TokenAccuracy(loss, device) if isinstance(loss, TokenLoss) and loss.counts_correct else None


class SFT(NextToken):
    """Supervised fine-tuning: the targets are the tokens of completions."""

    name = "sft"


class Pretraining(NextToken):
    """The targets are all tokens of documents, which fill their rows (`data/encoders/kinds.py`)."""

    name = "pretrain"


class TokenAccuracy:
    """`eval_token_accuracy`: the share of the evaluation's target tokens that have the largest logit; of equal logits
    the first counts.
    """

    def __init__(self, loss: TokenLoss, device: torch.device) -> None:
        self._loss, self._device = loss, device

    def add_step(self, counts: bool) -> None:
        """Do nothing: training steps are not counted."""

    def finish_interval(self) -> dict[str, float]:
        return {}

    def finish_evaluation(self) -> dict[str, float]:
        """Return the accuracy over all tokens since the last call. All ranks call it."""
        totals = self._loss.take_totals()
        if totals is None:
            totals = torch.zeros(2, dtype=torch.int64, device=self._device)
        # Ranks that share the vocabulary count the same tokens, which does not change the ratio.
        dist.all_reduce(totals)
        correct, num_targets = totals.tolist()
        return {"eval_token_accuracy": correct / num_targets} if num_targets else {}


class BothMetrics:
    """The metrics of two."""

    def __init__(self, first: Metrics, second: Metrics) -> None:
        self._both = (first, second)

    def add_step(self, counts: bool) -> None:
        for metrics in self._both:
            metrics.add_step(counts)

    def finish_interval(self) -> dict[str, float]:
        """Return the values of both. All ranks call it."""
        first, second = (metrics.finish_interval() for metrics in self._both)
        return first | second

    def finish_evaluation(self) -> dict[str, float]:
        """Return the values of both. All ranks call it."""
        first, second = (metrics.finish_evaluation() for metrics in self._both)
        return first | second
