"""The keys that change the loss of next-token objectives: smoothed labels, those of extensions, further tokens. A new
one is a class here and a place in `NEXT_TOKEN_MODIFIERS`, or one of an extension."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from extension import load_parts
from models.further.table import count_trained
from models.losses.cross_entropy import Loss
from models.losses.further_tokens import FurtherTokenLoss
from models.losses.token_loss import TokenLoss
from training.config.schema import RunConfig
from training.objectives.objective import LastStage, Modifier


class LabelSmoothing(Modifier):
    """Cross entropy with smoothed labels (1512.00567), in training only."""

    key = "label_smoothing"

    def read(self, config: RunConfig) -> float:
        return config.label_smoothing

    def change(self, loss: TokenLoss, config: RunConfig, stage: LastStage) -> Loss:
        return replace(loss, label_smoothing=config.label_smoothing)


class FurtherTokens(Modifier):
    """The loss of further tokens in addition (2412.19437)."""

    key = "mtp.loss_coef"

    def read(self, config: RunConfig) -> float:
        return config.mtp.loss_coef

    def list_metrics(self, config: RunConfig) -> None:
        """Return None: there is one for each depth, which the model knows."""

    def change(self, loss: Any, config: RunConfig, stage: LastStage) -> Loss:
        num_depths = count_trained(stage.architecture)
        return FurtherTokenLoss(loss, config.mtp.loss_coef, num_depths) if num_depths else loss


# In the order in which they change a loss
NEXT_TOKEN_MODIFIERS: tuple[Modifier, ...] = (LabelSmoothing(), *load_parts("modifiers"), FurtherTokens())
