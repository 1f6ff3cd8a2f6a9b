"""The keys that change the loss of next-token objectives: smoothed labels, a teacher, further tokens. A new one is a
class here and a place in `NEXT_TOKEN_MODIFIERS`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from batch import Column
from data.loading.columns import list_teacher_columns
from errors import UserError
from models.further.table import count_trained
from models.losses.cross_entropy import Loss
from models.losses.distill_loss import KeptTeacherTerm, OnlineTeacherTerm
from models.losses.divergence import DistillOptions
from models.losses.further_tokens import FurtherTokenLoss
from models.losses.token_loss import TokenLoss
from training.config.incompatible import write_value
from training.config.schema import RunConfig
from training.objectives.objective import FirstPass, LastStage, Modifier, PassOver


class LabelSmoothing(Modifier):
    """Cross entropy with smoothed labels (1512.00567), in training only."""

    key = "label_smoothing"

    def read(self, config: RunConfig) -> float:
        return config.label_smoothing

    def change(self, loss: TokenLoss, config: RunConfig, stage: LastStage) -> Loss:
        return replace(loss, label_smoothing=config.label_smoothing)


class Teacher(Modifier):
    """The divergence from a teacher's distributions in addition (1503.02531)."""

    key, off = "distill.teacher", "null"

    def read(self, config: RunConfig) -> str | None:
        return config.distill.teacher

    def scored(self, config: RunConfig) -> tuple[Column, ...]:
        keys = config.distill
        return () if keys.teacher is None or keys.online or keys.top_k is None else list_teacher_columns(keys.top_k)

    def check(self, config: RunConfig) -> None:
        if config.distill.top_k is None and not config.distill.online:
            raise UserError(
                "distill.top_k=null: the whole vocabulary at each target is not kept; give a number, such as 64, or "
                "distill.online=true"
            )

    def identity(self, config: RunConfig) -> dict[str, str]:
        names = ("coef", "temperature", "divergence", "top_k")
        return {f"distill.{name}": write_value(getattr(config.distill, name)) for name in names}

    def list_metrics(self, config: RunConfig) -> tuple[str, ...]:
        return ("distill_loss",)

    def change(self, loss: TokenLoss, config: RunConfig, stage: LastStage) -> Loss:
        keys = config.distill
        options = DistillOptions(keys.coef, keys.temperature, keys.divergence)
        term = OnlineTeacherTerm(options, stage.teacher) if keys.online else KeptTeacherTerm(options)
        return replace(loss, terms=(term, *loss.terms))

    def pass_over(self, config: RunConfig) -> PassOver | None:
        return PassOver.as_teacher if config.distill.online else None

    def before_step(self, loss: TokenLoss) -> FirstPass:
        (term,) = (each for each in loss.terms if isinstance(each, OnlineTeacherTerm))
        return FirstPass(term.head.take, term.take_states, by_group=True)


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


LABEL_SMOOTHING, TEACHER, FURTHER_TOKENS = LabelSmoothing(), Teacher(), FurtherTokens()
NEXT_TOKEN_MODIFIERS = (LABEL_SMOOTHING, TEACHER, FURTHER_TOKENS)  # in the order in which they change a loss
