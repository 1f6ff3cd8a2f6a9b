"""The loss of a run's last stage: that of its task, or the user's own (`loss: {_target_: ...}`, docs/add_your_data.md)."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PretrainedConfig

from data.collator import unshift_targets
from data.components import build_checked_component
from models.losses.cross_entropy import Loss
from models.parallel.shard import ALONE, TensorParallel
from training.config.schema import RunConfig
from training.objectives.dpo import build_dpo_loss


def build_run_loss(config: RunConfig, model_config: PretrainedConfig, parallel: TensorParallel = ALONE) -> Loss | None:
    """The loss of the run's last stage: one's own, or that of its task; None for the model's own cross entropy. parallel: who shares the head.

    Raises UserError for what is no loss.
    """
    if config.loss is None:
        return build_dpo_loss(config, model_config, parallel)
    need = "a class whose objects are called with (outputs, targets)"
    loss = build_checked_component(config.loss, "loss", example="my_losses.MyLoss", fits=callable, need=need)
    return AlignedLabels(loss)


class AlignedLabels(nn.Module):
    """A user's loss, which takes labels aligned with input_ids and shifts them itself; the loader hands out shifted targets.

    A module, so that the engine moves what a loss that is one holds.
    """

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.loss = loss

    def forward(
        self, outputs: tuple[torch.Tensor, torch.Tensor], targets: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        target_ids, loss_denominator = targets
        return self.loss(outputs, (unshift_targets(target_ids), loss_denominator))
