"""Which checkpoints are deleted, and that it is never the only complete one."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from test_checkpoint import STATE

from models.storage.manifest import HashedFile, find_wrong_size, write_manifest
from models.storage.steps import list_checkpoints
from training.checkpoint import retention
from training.checkpoint.best import Best
from training.checkpoint.retention import Retention, prune_checkpoints
from training.checkpoint.state import read_state, record_evaluation, remove_leftovers
from training.config.criterion import Criterion

LOSSES = {1: 3.0, 2: 1.0, 3: None, 4: 2.0, 5: 1.0, 6: math.nan, 7: 2.5}


@pytest.mark.parametrize(
    "keep_last, keep_best, deleted",
    [
        (None, None, []),
        (None, 1, []),
        (3, None, [1, 2, 3, 4]),
        (1, None, [1, 2, 3, 4, 5, 6]),
        (1, 1, [1, 3, 4, 5, 6]),  # of two equal losses the earlier
        (1, 2, [1, 3, 4, 6]),
        (2, 3, [1, 3]),
        (2, 99, [3]),
        (99, None, []),
    ],
)
def test_the_last_and_the_best_stay(keep_last: int | None, keep_best: int | None, deleted: list[int]) -> None:
    assert Retention(keep_last, keep_best).choose_prunable(LOSSES) == deleted


def test_the_newest_stays_whatever_is_asked() -> None:
    assert Retention(0, 0).choose_prunable({1: None, 2: None}) == [1]
    assert Retention(0, None).choose_prunable({2: 9.0}) == []


def test_more_may_be_better_and_one_may_be_kept_by_name() -> None:
    by_accuracy = Retention(1, 1, Criterion("eval_rewards_accuracy", greater_is_better=True))
    assert by_accuracy.choose_prunable(LOSSES) == [2, 3, 4, 5, 6]
    assert Retention(1).choose_prunable(LOSSES, kept={3}) == [1, 2, 4, 5, 6]


def save(
    checkpoints: Path,
    step: int,
    eval_loss: float | None = None,
    best: Best | None = None,
    weights_only: bool = False,
    evaluated_on: str = "",
) -> Path:
    evaluation = {} if eval_loss is None else {"eval_loss": eval_loss}
    step_dir = checkpoints / f"global_step{step}"
    step_dir.mkdir()
    state = replace(
        STATE, step=step, evaluation=evaluation, best=best, weights_only=weights_only, evaluated_on=evaluated_on
    )
    with HashedFile(step_dir / "trainer_state.json") as stream:
        stream.write(json.dumps(asdict(state)).encode())
        write_manifest(step_dir, {"trainer_state.json": stream.finish()})
    return step_dir


def names(checkpoints: Path) -> list[str]:
    return [path.name.removeprefix("global_step") for path in list_checkpoints(checkpoints)]


def test_deletion_by_loss(tmp_path: Path) -> None:
    for step, loss in ((2, 1.0), (4, 2.0), (6, 0.5), (8, 3.0)):
        newest = save(tmp_path, step, loss)
    prune_checkpoints(newest, Retention(keep_last=1, keep_best=1))
    assert names(tmp_path) == ["8", "6"] and len(list(tmp_path.iterdir())) == 2


def test_results_of_other_evaluation_files_are_not_compared(tmp_path: Path) -> None:
    """Those of step 2, from before files were recorded, may be of any."""
    for step, loss, files in ((2, 1.0, ""), (4, 0.5, "others"), (6, 2.0, "these"), (8, 3.0, "these")):
        newest = save(tmp_path, step, loss, evaluated_on=files)
    prune_checkpoints(newest, Retention(keep_last=1, keep_best=2))
    assert names(tmp_path) == ["8", "6", "2"]


def test_the_step_that_the_newest_calls_the_best_stays(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        newest = save(tmp_path, step, 1.0 / step, best=Best("eval_loss", False, 0.5, step=2))
    prune_checkpoints(newest, Retention(keep_last=1, keeps_best_step=True))
    assert names(tmp_path) == ["6", "2"]
    prune_checkpoints(newest, Retention(keep_last=1))
    assert names(tmp_path) == ["6"]


def test_weights_alone_never_replace_the_last_checkpoint_to_continue_from(tmp_path: Path) -> None:
    for step, weights_only in ((2, False), (4, False), (6, True), (8, True)):
        newest = save(tmp_path, step, weights_only=weights_only)
    prune_checkpoints(newest, Retention(keep_last=1))
    assert names(tmp_path) == ["8", "4"]


def test_what_is_broken_counts_for_nothing(tmp_path: Path) -> None:
    whole, broken, newest = save(tmp_path, 2), save(tmp_path, 4), save(tmp_path, 6)
    (broken / "trainer_state.json").unlink()
    prune_checkpoints(newest, Retention(keep_last=2))
    assert names(tmp_path) == ["6", "4", "2"]  # that of step 2 is the second complete one
    prune_checkpoints(newest, Retention(keep_last=1))
    assert names(tmp_path) == ["6", "4"] and not whole.exists()


def test_an_evaluation_that_came_after_the_save_counts(tmp_path: Path) -> None:
    """A signal had interrupted it, and the run that continues has made up for it."""
    for step, loss in ((2, 7.25), (4, None), (6, 16.51)):
        newest = save(tmp_path, step, loss, evaluated_on="these")
    evaluated = {"evaluation": {"eval_loss": 6.99}, "evaluated_on": "these"}
    at_4 = replace(STATE, step=4, best=Best("eval_loss", False, 6.99, 4), **evaluated)
    record_evaluation(tmp_path / "global_step4", at_4)
    assert find_wrong_size(tmp_path / "global_step4") is None and read_state(tmp_path / "global_step4") == at_4
    prune_checkpoints(newest, Retention(keep_last=1, keep_best=1))
    assert names(tmp_path) == ["6", "4"]


def test_a_deletion_that_dies_leaves_no_half_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, newest = save(tmp_path, 2), save(tmp_path, 4)
    with monkeypatch.context() as patch:
        patch.setattr(retention.shutil, "rmtree", lambda *_, **__: None)  # killed before the first file is gone
        prune_checkpoints(newest, Retention(keep_last=1))
    assert names(tmp_path) == ["4"]
    remove_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == [newest]
