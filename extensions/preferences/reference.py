"""Scores of the reference model, made once before training: the log-probability of each answer."""

from __future__ import annotations

import numpy as np
import torch
from transformers import PretrainedConfig

from batch import Column, Per, Source, Targets
from data.loading.columns import DOCUMENT_SUMS
from data.storage.scores import Scores
from errors import UserError
from models.losses.cross_entropy import document_log_probabilities, get_softcap
from models.losses.logit_chunks import shard_vocabulary
from models.parallel.shard import NO_CP, NO_TP, ContextParallel, TensorParallel
from training.objectives.objective import LastStage, Scorer

REFERENCE = Column("reference", torch.float64, Per.document, Source.scored)
_WHAT = "reference log-probabilities"  # as messages call them


class AnswerScore:
    """Computes, in place of a loss, the log-probability of each document's targets, one tensor: float64 [D]."""

    def __init__(
        self, config: PretrainedConfig, parallel: TensorParallel = NO_TP, sequence_part: ContextParallel = NO_CP
    ) -> None:
        self._softcap, self._sharing = get_softcap(config), shard_vocabulary(config, parallel)
        self._sequence_part = sequence_part

    def __call__(self, outputs: tuple[torch.Tensor, torch.Tensor], targets: Targets) -> tuple[torch.Tensor]:
        return (document_log_probabilities(outputs, targets, self._softcap, self._sharing, self._sequence_part),)


def build_answer_scorer(stage: LastStage, group_size: int) -> Scorer:
    """Build what scores answers by the model of a stage. group_size: 2 for pairs."""

    def refuse(key: str, number: int, value: np.ndarray) -> UserError:
        record, answer = divmod(number, group_size)
        named = f"the {('chosen', 'rejected')[answer]} answer of pair" if group_size == 2 else "sample"
        return UserError(f"{_WHAT} of {key}: that of {named} {record} (counted from 0) is {value}; look at the weights")

    def describe(scores: Scores) -> str:
        return f"{scores.num_values:,} answers"

    measure = AnswerScore(stage.architecture, stage.parallel, stage.sequence_part)
    return Scorer(_WHAT, "answers", measure, refuse, describe, columns=DOCUMENT_SUMS)
