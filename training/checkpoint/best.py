"""The best evaluation so far, and how long ago it was. Saved in each checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from console import pluralize
from training.config.criterion import Criterion


@dataclass(frozen=True)
class Best:
    """The best of the evaluations so far.

    step, value: of the best one; the value is NaN while every evaluation was NaN. evaluations_since: how many in a row,
    up to the last one, did not improve on the best before them by more than `early_stopping_threshold`.
    """

    metric: str
    greater_is_better: bool
    value: float
    step: int
    evaluations_since: int = 0

    @property
    def criterion(self) -> Criterion:
        return Criterion(self.metric, self.greater_is_better)


def update_best(
    best: Best | None, criterion: Criterion, evaluation: Mapping[str, Any], step: int, threshold: float = 0.0
) -> Best:
    """Return the best evaluation, including this step's. best: None before the first one."""
    value = evaluation[criterion.metric]
    if best is None:
        return Best(criterion.metric, criterion.greater_is_better, value, step)
    since = 0 if criterion.is_better(value, best.value, threshold) else best.evaluations_since + 1
    if criterion.is_better(value, best.value):
        return replace(best, value=value, step=step, evaluations_since=since)
    return replace(best, evaluations_since=since)


def has_lost_patience(best: Best | None, patience: int | None) -> bool:
    """Returns whether `early_stopping_patience` ends the run. patience: None for no early stopping."""
    return best is not None and patience is not None and best.evaluations_since >= patience


def describe_patience(best: Best, threshold: float) -> str:
    """Return the reason of an early stop in words."""
    by = f" by more than {threshold:g}" if threshold else ""
    return (
        f"{best.metric} has not improved{by} in {pluralize(best.evaluations_since, 'evaluation')}; the best is "
        f"{best.value:.4f} at step {best.step}"
    )
