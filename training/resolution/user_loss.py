"""The loss of a run's last stage: its objective's, or the user's own (`loss: {_target_: ...}`,
docs/add_your_data.md)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from batch import Targets
from data.collator import unshift_targets
from data.components import build_checked_component
from errors import UserError
from models.losses.cross_entropy import Loss
from training.config.schema import RunConfig
from training.objectives.objective import LastStage
from training.objectives.registry import get_objective

UserLoss = Callable[[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]], torch.Tensor]
"""Takes the outputs of the last stage, and labels aligned with input_ids with the denominator of the loss."""


def build_run_loss(config: RunConfig, stage: LastStage) -> Loss:
    """Build the loss of the run's last stage.

    Raises UserError for a user's loss where the objective has its own, and for a component that is not a loss.
    """
    objective = get_objective(config)
    if config.loss is None:
        return objective.loss(config, stage)
    if not objective.takes_user_loss:
        raise UserError(f"loss and task={objective.name}: each is a loss; give one of them")
    need = "a class whose objects are called with (outputs, targets)"
    loss = build_checked_component(config.loss, "loss", example="my_losses.MyLoss", fits=callable, need=need)
    return AlignedLabels(loss)


class AlignedLabels(nn.Module):
    """A user's loss, which takes labels aligned with input_ids and shifts them itself; the loader returns shifted
    targets.

    It is a module so that the engine moves the parameters and buffers of a loss that is one.
    """

    def __init__(self, loss: UserLoss) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, outputs: tuple[torch.Tensor, torch.Tensor], targets: Targets) -> torch.Tensor:
        return self.loss(outputs, (unshift_targets(targets.ids), targets.denominator))
