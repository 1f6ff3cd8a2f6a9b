"""Preference optimization in a run: its loss, and the rewards that it reports."""

from __future__ import annotations

import torch
import torch.distributed as dist
from transformers import PretrainedConfig

from models.losses.dpo import METRICS, DPOLoss, LossType
from models.parallel.shard import TensorParallel
from training.config.schema import RunConfig, Task, get_task


def build_dpo_loss(config: RunConfig, model_config: PretrainedConfig, parallel: TensorParallel) -> DPOLoss | None:
    """None for another task."""
    if get_task(config) is not Task.dpo:
        return None
    return DPOLoss(
        model_config,
        config.dpo.beta,
        label_smoothing=config.dpo.label_smoothing,
        loss_type=LossType(config.dpo.loss_type.value),
        parallel=parallel,
    )


def describe_loss(config: RunConfig) -> dict[str, str]:
    """What a run must keep to go on with the same loss; nothing for another task."""
    if get_task(config) is not Task.dpo:
        return {}
    dpo = config.dpo
    return {
        "dpo.beta": f"{dpo.beta:g}",
        "dpo.label_smoothing": f"{dpo.label_smoothing:g}",
        "dpo.loss_type": dpo.loss_type.value,
    }


class Rewards:
    """Means over pairs, of whole global batches: every rank that holds the loss adds its own, and all ranks are told."""

    def __init__(self, loss: DPOLoss, device: torch.device) -> None:
        self._loss, self._device = loss, device
        self._interval = self._zeros()

    def add_step(self, counts: bool) -> None:
        """Takes the last step's pairs into the interval, or forgets them."""
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
