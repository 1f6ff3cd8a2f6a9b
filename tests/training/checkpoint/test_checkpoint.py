"""The contents of a checkpoint other than its tensors."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from errors import UserError
from models.storage.manifest import HashedFile, write_manifest
from models.storage.steps import list_checkpoints
from training.checkpoint.state import TrainerState, read_state, remove_leftovers

STATE = TrainerState(
    step=2,
    num_tokens=100,
    num_stages=2,
    dp_size=1,
    global_batch_size=8,
    micro_batch_size=2,
    num_samples=40,
    total_steps=4,
    seed=42,
    precision="bf16",
    optimizer="adamw",
)
FILES = ("layer_00-model_states.pt", "layer_01-model_states.pt", "optimizer-stage_00-dp_00.safetensors")


def write_checkpoint(checkpoints: Path, step: int) -> Path:
    """A complete checkpoint, which `latest` names; its files hold no tensors."""
    step_dir = checkpoints / f"global_step{step}"
    step_dir.mkdir()
    contents = {name: f"content of {name}" for name in FILES} | {
        "trainer_state.json": json.dumps(asdict(replace(STATE, step=step)))
    }
    records = {}
    for name, content in contents.items():
        with HashedFile(step_dir / name) as stream:
            stream.write(content.encode())
            records[name] = stream.finish()
    write_manifest(step_dir, records)
    (checkpoints / "latest").write_text(step_dir.name)
    return step_dir


def test_the_state_is_read_back(tmp_path: Path) -> None:
    assert (read_state(write_checkpoint(tmp_path, 2)), read_state(write_checkpoint(tmp_path, 10))) == (
        STATE,
        replace(STATE, step=10),
    )


def test_checkpoints_are_listed_by_step(tmp_path: Path) -> None:
    two, ten = write_checkpoint(tmp_path, 2), write_checkpoint(tmp_path, 10)
    for name in ("tmp-global_step12", "global_step12.old-1a2b", "global_stepX"):
        (tmp_path / name).mkdir()
    assert list_checkpoints(tmp_path) == [ten, two]
    remove_leftovers(tmp_path)
    assert not (tmp_path / "tmp-global_step12").exists() and two.exists()


def test_a_state_that_cannot_be_read(tmp_path: Path) -> None:
    step_dir = write_checkpoint(tmp_path, 2)
    for text in ('{"step": 2', "[]", "{}", '{"step": 2, "unknown": 1}'):
        (step_dir / "trainer_state.json").write_text(text)
        with pytest.raises(
            UserError, match="trainer_state.json cannot be read .*; the checkpoint is damaged, resume from another one"
        ):
            read_state(step_dir)
    (step_dir / "trainer_state.json").write_text('{"format": 99}')
    with pytest.raises(
        UserError, match="written by a newer version of this project .format 99, this one reads 7.; update the project"
    ):
        read_state(step_dir)
