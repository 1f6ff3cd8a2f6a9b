"""Reward models: a score of a whole answer, learned from pairs of which one was preferred."""

from __future__ import annotations

import torch
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from data.options import MeanOver
from errors import UserError
from models.losses.cross_entropy import Loss
from models.losses.reward import RewardLoss
from models.parallel.shard import NO_CP, ContextParallel, TensorParallel
from training.config.schema import RunConfig
from training.objectives.objective import Metrics, Objective
from training.objectives.preference import check_coefficient
from training.objectives.reported_means import ReportedMeans


class Reward(Objective):
    """A sample is a pair: rows 2 i and 2 i + 1 of a micro-batch are the chosen and the rejected answer."""

    name = "reward"
    data_kinds = ("preference",)
    unit = "pairs"
    rows_per_sample = 2
    mean_over = MeanOver.samples
    scores_rows = True

    def check(self, config: RunConfig) -> None:
        check_coefficient("reward.centering_coef", config.reward.centering_coef)

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """`transformers` scores the last token of a row that is not its pad token: where that ends answers too, it
        would be the token before."""
        if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
            which = "none" if tokenizer.pad_token_id is None else f"its end token, '{tokenizer.eos_token}'"
            raise UserError(
                f"task=reward: the tokenizer's pad token is {which}; transformers scores the last token that is not "
                "padding, so it has to be another one: convert2ckpt.py --pad_token '<pad>' adds it"
            )

    def describe(self, config: RunConfig) -> dict[str, str]:
        return self.describe_keys(config)

    def build_loss(
        self,
        config: RunConfig,
        model_config: PretrainedConfig,
        parallel: TensorParallel,
        sequence_part: ContextParallel = NO_CP,
    ) -> Loss:
        return RewardLoss(config.reward.centering_coef, sequence_part=sequence_part)

    def list_metrics(self, config: RunConfig) -> tuple[str, ...]:
        return RewardLoss.metrics

    def build_metrics(self, loss: Loss, device: torch.device) -> Metrics:
        assert isinstance(loss, RewardLoss)
        return ReportedMeans(loss, device)
