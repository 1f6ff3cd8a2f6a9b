"""The teacher of a distillation that scores the data once: its most probable tokens at each target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data.loading.loader import LoaderOptions
from data.storage.disk import describe_bytes
from data.storage.scores import Scores
from errors import UserError
from models.losses.distill_loss import TeacherTop
from training.distributed.ranks import Ranks
from training.engine.engine import Engine
from training.scoring.scored import Scorer, score

_READ = 2**16  # targets at a time


def say_found(found: Mapping[str, Scores], missing: Sequence[str], ranks: Ranks) -> None:
    """Print which scores are there; see `find_missing`."""
    folders = {found[key].folder for key in missing}
    for key, scores in found.items():
        if scores.folder not in folders:
            _say_covered(scores, key, "found next to the tokens", ranks)


def score_as_teacher(
    engine: Engine, path: Path, scores: Scores, options: LoaderOptions, measure: TeacherTop, *, key: str, ranks: Ranks
) -> None:
    """Score a tokenized folder; see `score`. measure: of the teacher's last stage."""
    size = describe_bytes(scores.num_bytes)
    ranks.say(
        f"teacher of {key}: {_count_kept(scores)} tokens at each of {scores.num_values:,} targets, {size} on disk"
    )
    scorer = Scorer("teacher of", "rows", measure, _refuse, _note_covered)
    score(engine, path, scores, options, key=key, scorer=scorer, ranks=ranks)
    _say_covered(scores, key, "done", ranks)


def _count_kept(scores: Scores) -> int:
    """Return k."""
    return scores.columns[0].shape[0]


def _say_covered(scores: Scores, key: str, state: str, ranks: Ranks) -> None:
    if ranks.is_main:
        covered = scores.read_description()["covered"]
        ranks.say(f"teacher of {key}: {state}, {_count_kept(scores)} tokens cover {covered:.2%} of its probability")


def _note_covered(values: Sequence[np.ndarray]) -> dict[str, Any]:
    """Return the mean probability that the tokens of a target cover."""
    others = values[-1][:, -1]  # log-probabilities
    parts = (others[start : start + _READ].astype(np.float64) for start in range(0, len(others), _READ))
    return {"covered": sum(float((1 - np.exp(part)).sum()) for part in parts) / len(others)}


def _refuse(key: str, number: int, value: np.ndarray) -> UserError:
    return UserError(f"teacher of {key}: a log-probability is not finite; look at the weights of distill.teacher")
