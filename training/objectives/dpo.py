"""Direct preference optimization (2305.18290): pairs of answers, against what the model thought of them before."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from transformers import PretrainedConfig

from data.options import MeanOver
from errors import UserError
from models.losses.cross_entropy import Loss
from models.losses.dpo import METRICS, DPOLoss
from models.parallel.shard import TensorParallel
from training.config.schema import RunConfig
from training.objectives.objective import Metrics, Objective


class DPO(Objective):
    """A sample is a pair: rows 2 i and 2 i + 1 of a micro-batch are the chosen and the rejected answer."""

    name = "dpo"
    unit = "pairs"
    rows_per_sample = 2
    mean_over = MeanOver.samples
    needs_reference = True
    remakes_logits = True

    def check(self, config: RunConfig) -> None:
        dpo = config.dpo
        if not 0 < dpo.beta < math.inf:
            raise UserError(f"dpo.beta={dpo.beta}: more than 0")
        if not 0 <= dpo.label_smoothing < 0.5:
            raise UserError(
                f"dpo.label_smoothing={dpo.label_smoothing}: from 0 to below 0.5, where no preference would be left"
            )

    def describe(self, config: RunConfig) -> dict[str, str]:
        dpo = config.dpo
        return {
            "dpo.beta": f"{dpo.beta:g}",
            "dpo.label_smoothing": f"{dpo.label_smoothing:g}",
            "dpo.loss_type": dpo.loss_type.value,
        }

    def build_loss(self, config: RunConfig, model_config: PretrainedConfig, parallel: TensorParallel) -> Loss:
        dpo = config.dpo
        return DPOLoss(
            model_config,
            dpo.beta,
            label_smoothing=dpo.label_smoothing,
            loss_type=dpo.loss_type,
            parallel=parallel,
        )

    def build_metrics(self, loss: Loss, device: torch.device) -> Metrics:
        assert isinstance(loss, DPOLoss)
        return Rewards(loss, device)


class Rewards:
    """Means over the pairs of whole global batches: ranks that hold the loss add their own, every rank gets the sum."""

    def __init__(self, loss: DPOLoss, device: torch.device) -> None:
        self._loss, self._device = loss, device
        self._interval = self._zeros()

    def add_step(self, counts: bool) -> None:
        """Takes the last step's pairs into the interval, or discards them."""
        totals = self._loss.take_totals()
        if counts and totals is not None:
            self._interval += totals

    def finish_interval(self) -> dict[str, float]:
        """Of the steps since the last call; empty when there were none. All ranks call it."""
        totals, self._interval = self._interval, self._zeros()
        return self._compute_means(totals)

    def finish_evaluation(self) -> dict[str, float]:
        """Of all pairs since the last step. All ranks call it."""
        totals = self._loss.take_totals()
        return {
            f"eval_{name}": mean
            for name, mean in self._compute_means(self._zeros() if totals is None else totals).items()
        }

    def _compute_means(self, totals: torch.Tensor) -> dict[str, float]:
        dist.all_reduce(totals)
        *sums, num_pairs = totals.tolist()
        return {name: total / num_pairs for name, total in zip(METRICS, sums, strict=True)} if num_pairs else {}

    def _zeros(self) -> torch.Tensor:
        return torch.zeros(len(METRICS) + 1, dtype=torch.float64, device=self._device)
