"""Which checkpoint a run resumes from, and that a save is whole or not there. The tensors themselves: test_run.py."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from errors import UserError
from training import checkpoint
from training.checkpoint import TrainerState, check_resumable, find_resume, read_state, remove_leftovers, save_checkpoint

STATE = TrainerState(
    step=2, num_tokens=100, num_stages=2, dp_size=1, global_batch_size=8, micro_batch_size=2, num_samples=40, total_steps=4, seed=42
)


class Engine:
    """Writes what DeepSpeed would."""

    def save_checkpoint(self, folder: str, tag: str, save_latest: bool) -> None:
        assert not save_latest
        step_dir = Path(folder) / tag
        step_dir.mkdir(parents=True)
        for name in ("layer_00-model_states.pt", "layer_01-model_states.pt", "mp_rank_00_model_states.pt"):
            (step_dir / name).write_text(f"content of {name}")


@pytest.fixture
def save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Path]:
    """save(step): as the only rank."""
    monkeypatch.setattr(checkpoint, "dist", SimpleNamespace(barrier=lambda: None, get_rank=lambda: 0))
    return lambda step: save_checkpoint(Engine(), tmp_path, replace(STATE, step=step))


def test_a_save_is_found_and_read_back(save: Callable[[int], Path], tmp_path: Path) -> None:
    first, second = save(2), save(4)
    assert find_resume("latest", tmp_path) == find_resume(str(tmp_path), Path("elsewhere")) == second == tmp_path / "global_step4"
    assert find_resume(str(first), tmp_path) == first
    assert find_resume(None, tmp_path) is None
    assert (read_state(first), read_state(second)) == (STATE, replace(STATE, step=4))


@pytest.mark.parametrize("owner, name", [(Engine, "save_checkpoint"), (checkpoint, "_sync_files"), (os, "rename"), (checkpoint, "write_atomically")])
def test_a_save_that_dies_leaves_the_one_before(save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    whole = save(2)

    def die(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(owner, name, die)
        save(4)
    assert find_resume("latest", tmp_path) == whole
    remove_leftovers(tmp_path)
    assert save(4) == find_resume("latest", tmp_path)


def test_a_temporary_folder_is_never_taken(save: Callable[[int], Path], tmp_path: Path) -> None:
    whole = save(4)
    leftover = whole.rename(tmp_path / "tmp-global_step4")  # everything written, the rename never came
    (tmp_path / "latest").unlink()
    with pytest.raises(UserError, match="no training checkpoint of this project"):
        find_resume("latest", tmp_path)
    with pytest.raises(UserError, match="a save that never ended"):
        find_resume(str(leftover), tmp_path)
    kept = save(6)
    remove_leftovers(tmp_path)
    assert not leftover.exists() and find_resume("latest", tmp_path) == kept


def test_what_is_no_checkpoint(save: Callable[[int], Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="resume=latest: there is no checkpoint at .*; leave resume out to start a new run"):
        find_resume("latest", tmp_path / "none")
    (tmp_path / "converted" / "global_step0").mkdir(parents=True)
    (tmp_path / "converted" / "latest").write_text("global_step0")
    with pytest.raises(UserError, match="converted/global_step0 is no training checkpoint .* give it as model_name_or_path"):
        find_resume(str(tmp_path / "converted"), tmp_path)


def test_a_half_written_checkpoint_names_its_file(save: Callable[[int], Path], tmp_path: Path) -> None:
    step_dir = save(2)
    layer = step_dir / "layer_01-model_states.pt"
    layer.write_text("half")
    with pytest.raises(UserError, match=f"resume: {layer} is damaged: 4 bytes, 35 were saved; copy the checkpoint again, or resume from another"):
        find_resume("latest", tmp_path)
    layer.unlink()
    with pytest.raises(UserError, match=f"resume: {layer} is missing"):
        find_resume("latest", tmp_path)
    for text in ('{"step": 2', "[]", "{}", '{"step": 2, "file_sizes": {}}'):
        (step_dir / "trainer_state.json").write_text(text)
        with pytest.raises(UserError, match="trainer_state.json cannot be read .*; the checkpoint is damaged, resume from another one"):
            read_state(step_dir)


@pytest.mark.parametrize("name", ["num_stages", "dp_size", "global_batch_size", "micro_batch_size", "num_samples", "seed"])
def test_another_layout_or_data_set_is_refused_by_name(name: str) -> None:
    was = getattr(STATE, name)
    with pytest.raises(UserError, match=f"{name} was {was}, is {was + 1}. Give the same values, or .* model_name_or_path=/c/global_step2"):
        check_resumable(STATE, replace(STATE, **{name: was + 1}), Path("/c/global_step2"))


def test_all_that_differs_is_named_at_once() -> None:
    with pytest.raises(UserError, match="num_stages was 2, is 1; seed was 42, is 1"):
        check_resumable(STATE, replace(STATE, num_stages=1, seed=1), Path("/c/global_step2"))


def test_a_longer_schedule_may_go_on() -> None:
    check_resumable(STATE, replace(STATE, step=0, num_tokens=0, total_steps=99), Path("/c/global_step2"))
