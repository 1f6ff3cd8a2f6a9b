"""The scores that a teacher leaves before training: its most probable tokens at each target."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from batch import Column, Per, Source
from data.storage.disk import describe_bytes
from data.storage.scores import DESCRIPTION, Scores
from errors import UserError
from extensions.distillation.loss import TeacherTop
from training.objectives.objective import Scorer

_READ = 2**16  # targets at a time


def list_teacher_columns(top_k: int) -> tuple[Column, ...]:
    """Return the teacher's k most probable tokens at each target, [N, k], the most probable first, and the
    log-probabilities of these and of all others together, [N, k + 1]."""
    return (
        Column("teacher_token_ids", torch.int32, Per.target, Source.scored, shape=(top_k,)),
        Column("teacher_log_probabilities", torch.float32, Per.target, Source.scored, shape=(top_k + 1,)),
    )


def build_teacher_scorer(measure: TeacherTop) -> Scorer:
    """Build what scores targets by a teacher. measure: of its last stage."""

    def refuse(key: str, number: int, value: np.ndarray) -> UserError:
        return UserError(f"teacher of {key}: a log-probability is not finite; look at the weights of distill.teacher")

    return Scorer(
        "teacher",
        "rows",
        measure,
        refuse,
        describe_covered,
        _note_covered,
        begin=lambda scores: (
            f"{scores.columns[0].shape[0]} tokens at each of {scores.num_values:,} targets, "
            f"{describe_bytes(scores.num_bytes)} on disk"
        ),
        values="the teacher's distributions",
        fewer="lower distill.top_k, ",
    )


def describe_covered(scores: Scores) -> str:
    """Return in words how much of its probability a teacher has left. Raises OSError."""
    covered = json.loads((scores.folder / DESCRIPTION).read_text())["covered"]
    return f"{scores.columns[0].shape[0]} tokens cover {covered:.2%} of its probability"


def _note_covered(values: Sequence[np.ndarray]) -> dict[str, Any]:
    """Return the mean probability that the tokens of a target cover."""
    others = values[-1][:, -1]  # log-probabilities
    parts = (others[start : start + _READ].astype(np.float64) for start in range(0, len(others), _READ))
    return {"covered": sum(float((1 - np.exp(part)).sum()) for part in parts) / len(others)}
