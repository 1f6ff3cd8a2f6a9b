"""Next-token cross entropy, with token accuracy in evaluations: SFT and pretraining."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from errors import UserError
from models.losses.cross_entropy import Loss
from models.losses.token_loss import TokenAccuracy, TokenLoss
from training.config.incompatible import write_value
from training.config.schema import Precision, RunConfig
from training.objectives.modifiers import NEXT_TOKEN_MODIFIERS
from training.objectives.objective import FirstPass, LastStage, Modifier, Objective, PassOver


class NextToken(Objective):
    """Mean cross entropy of the target tokens."""

    modifiers = NEXT_TOKEN_MODIFIERS
    takes_user_loss = predicts_tokens = True

    def loss(self, config: RunConfig, stage: LastStage) -> Loss:
        loss = TokenLoss(stage.architecture, stage.parallel)
        if config.eval_token_accuracy:
            loss = replace(loss, terms=(TokenAccuracy(),))
        changed: Loss = loss
        for modifier in self.list_active(config):
            num_terms = _count_terms(changed)
            changed = modifier.change(changed, config, stage)
            if config.precision is Precision.fp16 and _count_terms(changed) > num_terms:
                key, value = modifier.key, write_value(modifier.read(config))
                raise UserError(
                    f"{key}={value}: the gradient of the term that it adds to the loss is computed before the loss "
                    f"scale of precision=fp16 is known; use precision=bf16 or fp32, or give {key}={modifier.off}"
                )
        return changed

    def pass_over(self, config: RunConfig) -> PassOver | None:
        return next((each.pass_over(config) for each in self._list_passing(config)), None)

    def before_step(self, config: RunConfig, loss: Any) -> FirstPass:
        return self._list_passing(config)[0].before_step(loss)

    def _list_passing(self, config: RunConfig) -> list[Modifier]:
        return [each for each in self.list_active(config) if each.pass_over(config) is not None]

    def identity(self, config: RunConfig) -> dict[str, str]:
        return {key: value for each in self.list_active(config) for key, value in each.identity(config).items()}

    def list_metrics(self, config: RunConfig) -> tuple[str, ...] | None:
        if config.loss is not None:
            return ()
        found = [each.list_metrics(config) for each in self.list_active(config)]
        if any(names is None for names in found):
            return None
        accuracy = ("token_accuracy",) if config.eval_token_accuracy else ()
        return (*(name for names in found for name in names or ()), *accuracy)


def _count_terms(loss: Loss) -> int:
    """Return the number of terms of a loss; 0 for one that modifiers have wrapped."""
    return len(getattr(loss, "terms", ()))


class SFT(NextToken):
    """Supervised fine-tuning: the targets are the tokens of completions."""

    name = "sft"


class Pretraining(NextToken):
    """The targets are all tokens of documents, which fill their rows (`data/encoders/kinds.py`)."""

    name = "pretrain"
