"""Which checkpoints stay: the last few, and the best few by evaluation loss."""

from __future__ import annotations

import math
import os
import shutil
from pathlib import Path

from errors import UserError
from training.checkpoint.manifest import find_wrong_size
from training.checkpoint.state import TEMPORARY_PREFIX, list_checkpoints, read_state, step_of


def choose_prunable(eval_losses: dict[int, float | None], keep_last: int | None, keep_best: int | None) -> list[int]:
    """The steps to delete, of those that are saved with their losses. The newest always stays.

    keep_last: None keeps all. keep_best: that many more may stay for their loss, the earlier of two equal ones.
    """
    if keep_last is None:
        return []
    newest_first = sorted(eval_losses, reverse=True)
    evaluated = [step for step, loss in eval_losses.items() if loss is not None and not math.isnan(loss)]
    best = sorted(evaluated, key=lambda step: (eval_losses[step], step))[: keep_best or 0]
    return sorted(set(newest_first[max(keep_last, 1) :]) - set(best))


def prune_checkpoints(newest: Path, keep_last: int | None, keep_best: int | None) -> None:
    """Deletes checkpoints beside `newest`, which has just become whole.

    What is not whole counts for nothing and stays for a person to look at, and so do steps after `newest`: the run went
    back before them, and they may be why.
    """
    losses: dict[int, float | None] = {}
    for step_dir in list_checkpoints(newest.parent):
        if step_of(step_dir) <= step_of(newest) and find_wrong_size(step_dir) is None:
            try:
                losses[step_of(step_dir)] = read_state(step_dir).eval_loss
            except UserError:  # not ours to delete
                continue
    for step in choose_prunable(losses, keep_last, keep_best):
        _delete(newest.with_name(f"global_step{step}"))


def _delete(step_dir: Path) -> None:
    """Under a temporary name, so that one half deleted is never taken for a checkpoint."""
    doomed = step_dir.with_name(f"{TEMPORARY_PREFIX}deleted-{step_dir.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(step_dir, doomed)
    shutil.rmtree(doomed, ignore_errors=True)
