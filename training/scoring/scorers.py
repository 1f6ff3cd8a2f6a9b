"""The models that score data once before training: a reference model, for an objective with scored columns, and
the teacher of a distillation.

The reference is the model at `model_name_or_path`. A run that starts there computes with its own weights, a LoRA run
with its adapter switched off. A run that resumes finds what the run that it continues has left; where that is missing,
or was computed by other weights, it loads the reference's weights, scores the data, and reloads its own. So no rank
ever holds two models. A teacher is built before its student, and is gone when the data are scored.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from data.storage.scores import DESCRIPTION, Scores
from errors import UserError
from models.adapters.adapter import adapter_off
from models.losses.distill_loss import TeacherTop
from models.weights.source import WeightSource
from training.objectives.objective import Scorer
from training.pipeline.module import StageModule
from training.pipeline.preparation import copy_weights

_READ = 2**16  # targets at a time


@contextmanager
def hold_reference(module: StageModule, reference: WeightSource, own: WeightSource) -> Iterator[None]:
    """Make the stage compute as the reference model does. own: the source of its weights, which may be the same."""
    if module.options.adapter is not None:
        with adapter_off(module):
            yield
    elif own is reference:
        yield
    else:
        copy_weights(module.local_layers, reference, module.ranks)
        yield
        copy_weights(module.local_layers, own, module.ranks)


def build_teacher_scorer(measure: TeacherTop) -> Scorer:
    """Build what scores targets by a teacher. measure: of its last stage."""

    def refuse(key: str, number: int, value: np.ndarray) -> UserError:
        return UserError(f"teacher of {key}: a log-probability is not finite; look at the weights of distill.teacher")

    return Scorer("teacher", "rows", measure, refuse, describe_covered, _note_covered)


def describe_covered(scores: Scores) -> str:
    """Return in words how much of its probability a teacher has left. Raises OSError."""
    covered = json.loads((scores.folder / DESCRIPTION).read_text())["covered"]
    return f"{scores.columns[0].shape[0]} tokens cover {covered:.2%} of its probability"


def _note_covered(values: Sequence[np.ndarray]) -> dict[str, Any]:
    """Return the mean probability that the tokens of a target cover."""
    others = values[-1][:, -1]  # log-probabilities
    parts = (others[start : start + _READ].astype(np.float64) for start in range(0, len(others), _READ))
    return {"covered": sum(float((1 - np.exp(part)).sum()) for part in parts) / len(others)}
