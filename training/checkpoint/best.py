"""Which evaluation is the best so far, and how long ago it was. Part of what a checkpoint says of its run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from training.config.criterion import Criterion


@dataclass(frozen=True)
class Best:
    """Of the evaluations so far.

    step, value: of the best one; the value is NaN while there has been no other. evaluations_since: how many in a row,
    up to the last one, were no better by more than `early_stopping_threshold` than the best before them.
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
    """With the evaluation of this step. best: None before the first one."""
    value = evaluation[criterion.metric]
    if best is None:
        return Best(criterion.metric, criterion.greater_is_better, value, step)
    since = 0 if criterion.is_better(value, best.value, threshold) else best.evaluations_since + 1
    if criterion.is_better(value, best.value):
        return replace(best, value=value, step=step, evaluations_since=since)
    return replace(best, evaluations_since=since)


def has_lost_patience(best: Best | None, patience: int | None) -> bool:
    """Whether `early_stopping_patience` ends the run. None: it is not asked to."""
    return best is not None and patience is not None and best.evaluations_since >= patience


def describe_patience(best: Best, threshold: float) -> str:
    by = f" by more than {threshold:g}" if threshold else ""
    return (
        f"{best.metric} has not improved{by} in {best.evaluations_since} evaluations; the best is {best.value:.4f} at "
        f"step {best.step}"
    )
