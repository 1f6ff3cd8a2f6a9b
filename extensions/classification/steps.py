"""Process rewards (2305.20050): whether each step of an answer is right, from the hidden state of the last token of its
separator. The loss is the cross entropy of two labels, a mean over the steps of the global batch. N steps.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from batch import Targets
from data.options import ProblemType
from extensions.classification.documents import SHOWN, ClassScores, build_class_metrics
from extensions.classification.token_head import TOKEN_CLASSIFICATION
from models.heads.head import Labels
from models.losses.cross_entropy import Loss
from training.config.schema import DataConfig, RunConfig
from training.objectives.objective import LastStage, Metrics, Objective

LABELS = ("false", "true")


class ProcessRewardLoss:
    """The loss of the last stage of a process reward model. Each of the ranks that share sequences has the steps that
    end in its part.

    scores: the scores of steps since they were last taken.
    """

    def __init__(self) -> None:
        self.scores = ClassScores(ProblemType.single_label_classification, len(LABELS))

    def __call__(self, outputs: tuple[torch.Tensor, ...], targets: Targets) -> torch.Tensor:
        """outputs: hidden states [B, T, D] and the head's matrix [2, D]. targets: 1 or 0 where a step ends, right or
        not.

        Returns the sum of the steps' losses over the denominator, fp32 at least.
        """
        hidden_states, weight, *_ = outputs
        indices = targets.indices
        dtype = torch.promote_types(weight.dtype, torch.float32)
        scores = F.linear(hidden_states.flatten(0, 1).index_select(0, indices).to(dtype), weight.to(dtype))  # [N, 2]
        labels = targets.ids.flatten().index_select(0, indices)
        self.scores.add(scores, labels.unsqueeze(1))
        return (F.cross_entropy(scores, labels, reduction="sum") / targets.denominator).to(dtype)


class ProcessReward(Objective):
    """A sample is an answer; its terms are its steps."""

    name = "process_reward"
    pipeline_tag = "token-classification"
    unit = "answers"
    head = TOKEN_CLASSIFICATION
    shown = SHOWN

    def name_labels(self, data: DataConfig) -> Labels:
        return Labels(LABELS)

    def loss(self, config: RunConfig, stage: LastStage) -> Loss:
        return ProcessRewardLoss()

    def metrics(self, loss: ProcessRewardLoss, device: torch.device) -> Metrics:
        return build_class_metrics(loss.scores, device)
