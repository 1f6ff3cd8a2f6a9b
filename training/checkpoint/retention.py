"""Chooses which checkpoints to keep: the last few, the best few by evaluation, and the one the run will end with."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Set
from dataclasses import dataclass, field
from pathlib import Path

from errors import UserError
from models.storage.manifest import find_wrong_size
from models.storage.steps import TEMPORARY_PREFIX, list_checkpoints, step_of
from training.checkpoint.state import read_state
from training.config.criterion import Criterion
from training.config.schema import RunConfig


@dataclass(frozen=True)
class Retention:
    """The checkpoints to keep.

    keep_last: None keeps all. keep_best: the best ones to keep as well, the earlier of two equal ones.
    keeps_best_step: keep the step that the newest checkpoint records as the best in any case.
    """

    keep_last: int | None = None
    keep_best: int | None = None
    criterion: Criterion = field(default_factory=Criterion)
    keeps_best_step: bool = False

    @classmethod
    def of(cls, config: RunConfig) -> Retention:
        return cls(config.keep_last, config.keep_best, Criterion.of(config), config.load_best_model_at_end)

    def choose_prunable(self, metrics: dict[int, float | None], kept: Set[int] = frozenset()) -> list[int]:
        """Return the steps to delete. metrics: of each saved step. The newest step, and `kept`, always stay."""
        if self.keep_last is None:
            return []
        newest_first = sorted(metrics, reverse=True)
        known = {step: value for step, value in metrics.items() if value is not None and not math.isnan(value)}
        best = sorted(known, key=lambda step: (self.criterion.sort_key(known[step]), step))[: self.keep_best or 0]
        return sorted(set(newest_first[max(self.keep_last, 1) :]) - set(best) - kept)


KEEP_ALL = Retention()


def prune_checkpoints(newest: Path, retention: Retention) -> None:
    """Delete the checkpoints next to `newest`, just completed, that `retention` does not keep. The newest one that a
    run can continue from stays too, which is an older one under `save_weights_only`.

    Incomplete checkpoints are not counted, and are left for a person to look at.
    """
    metrics: dict[int, float | None] = {}
    last = read_state(newest)
    resumable = set[int]()
    for step_dir in list_checkpoints(newest.parent):
        if find_wrong_size(step_dir) is None:
            try:
                state = read_state(step_dir)
            except UserError:  # not ours to delete
                continue
            comparable = state.evaluated_on in ("", last.evaluated_on)
            metrics[step_of(step_dir)] = state.evaluation.get(retention.criterion.metric) if comparable else None
            if not state.weights_only:
                resumable.add(step_of(step_dir))
    best = last.best if retention.keeps_best_step else None
    kept = {max(resumable, default=last.step)} | (set() if best is None else {best.step})
    for step in retention.choose_prunable(metrics, kept):
        _delete(newest.with_name(f"global_step{step}"))


def _delete(step_dir: Path) -> None:
    """Delete a folder under a temporary name, so that a half-deleted one is never mistaken for a checkpoint."""
    doomed = step_dir.with_name(f"{TEMPORARY_PREFIX}deleted-{step_dir.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(step_dir, doomed)
    shutil.rmtree(doomed, ignore_errors=True)
