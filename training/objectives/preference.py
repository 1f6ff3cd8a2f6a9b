"""The base of objectives over pairs of answers (`models/losses/pairs.py`); each adds its formula, keys and checks."""

from __future__ import annotations

import torch
from transformers import PretrainedConfig

from data.options import MeanOver
from models.losses.cross_entropy import Loss
from models.losses.pairs import REWARDS, PairFormula, PairLoss
from models.parallel.shard import NO_CP, ContextParallel, TensorParallel
from training.config.schema import DataConfig
from training.objectives.objective import Metrics, Objective, ObjectiveOptions, ReportedMeans


class PreferenceObjective(Objective):
    """A sample is a pair: rows 2 i and 2 i + 1 of a micro-batch are the chosen and the rejected answer."""

    data_kinds = ("preference",)
    unit = "pairs"
    mean_over = MeanOver.samples
    remakes_logits = True

    def count_rows(self, data: DataConfig) -> int:
        return 2

    def build_formula(self, options: ObjectiveOptions) -> PairFormula:
        """Build the loss of one pair."""
        raise NotImplementedError

    def describe(self, options: ObjectiveOptions) -> dict[str, str]:
        return self.describe_keys(options)

    def build_loss(
        self,
        options: ObjectiveOptions,
        model_config: PretrainedConfig,
        parallel: TensorParallel,
        sequence_part: ContextParallel = NO_CP,
    ) -> Loss:
        formula = self.build_formula(options)
        return PairLoss(model_config, formula, parallel=parallel, sequence_part=sequence_part)

    def list_metrics(self, options: ObjectiveOptions) -> tuple[str, ...]:
        return (*REWARDS, *self.build_formula(options).reported)

    def build_metrics(self, loss: Loss, device: torch.device) -> Metrics:
        assert isinstance(loss, PairLoss)
        return ReportedMeans(loss, device)
