"""Kahneman-Tversky optimization (2402.01306): single answers that were liked or not, against what the model thought of
them before."""

from __future__ import annotations

import torch
from transformers import PretrainedConfig

from data.options import MeanOver
from models.losses.cross_entropy import Loss
from models.losses.kto import KTOLoss
from models.parallel.shard import NO_CP, ContextParallel, TensorParallel
from training.config.schema import RunConfig
from training.objectives.objective import FirstPass, Metrics, Objective
from training.objectives.preference import check_more_than_zero
from training.objectives.reported_means import ReportedMeans


class KTO(Objective):
    """A sample is one answer. Of pairs, both are: the chosen one is desirable, the rejected one is not."""

    name = "kto"
    data_kinds = ("preference",)
    mean_over = MeanOver.samples
    needs_reference = True
    needs_first_pass = True
    remakes_logits = True

    def check(self, config: RunConfig) -> None:
        for key in ("beta", "desirable_weight", "undesirable_weight"):
            check_more_than_zero(f"kto.{key}", getattr(config.kto, key))

    def describe(self, config: RunConfig) -> dict[str, str]:
        return self.describe_keys(config)

    def build_loss(
        self,
        config: RunConfig,
        model_config: PretrainedConfig,
        parallel: TensorParallel,
        sequence_part: ContextParallel = NO_CP,
    ) -> Loss:
        kto = config.kto
        return KTOLoss(
            model_config,
            kto.beta,
            desirable_weight=kto.desirable_weight,
            undesirable_weight=kto.undesirable_weight,
            parallel=parallel,
            sequence_part=sequence_part,
        )

    def plan_first_pass(self, loss: Loss) -> FirstPass:
        assert isinstance(loss, KTOLoss)
        return FirstPass(loss.sum_log_ratios, loss.take_first_mean)

    def list_metrics(self, config: RunConfig) -> tuple[str, ...]:
        return KTOLoss.metrics

    def build_metrics(self, loss: Loss, device: torch.device) -> Metrics:
        assert isinstance(loss, KTOLoss)
        return ReportedMeans(loss, device)
