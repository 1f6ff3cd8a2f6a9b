"""Training checkpoints: DeepSpeed's files in a folder that becomes visible when it is whole.

    checkpoints/  latest  config.json  tokenizer files  global_stepN/
    global_stepN/ layer_XX-model_states.pt (weights, any stage count)  mp_rank_XX_model_states.pt and *optim_states.pt (this layout)
                  trainer_state.json (where the run stands; the size of each file, so that one that was cut off is told)

Random numbers, learning rate and sample order are functions of the step, so the step is all the state there is beside the tensors.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from deepspeed import comm as dist
from deepspeed.runtime.pipe.engine import PipelineEngine

from errors import UserError
from models.folders import sync_to_disk
from training.run_folder import write_atomically

_STATE_FILE = "trainer_state.json"
_SIZES = "file_sizes"
_TEMPORARY_PREFIX = "tmp-"


@dataclass(frozen=True)
class TrainerState:
    """Where a run stands, and what it must keep to go on from there."""

    step: int  # optimizer steps done
    num_tokens: int  # seen so far, without padding
    num_stages: int
    dp_size: int
    global_batch_size: int
    micro_batch_size: int
    num_samples: int
    total_steps: int
    seed: int


def save_checkpoint(engine: PipelineEngine, checkpoints: Path, state: TrainerState, adapter_only: bool = False) -> Path:
    """Writes `global_step{state.step}` under a temporary name and renames it when every rank is done; `latest` moves last.

    adapter_only: leaves out what is frozen. All ranks call it. Returns the folder.
    """
    tag = f"global_step{state.step}"
    engine.save_checkpoint(str(checkpoints), tag=_TEMPORARY_PREFIX + tag, save_latest=False, exclude_frozen_parameters=adapter_only)
    dist.barrier()
    if dist.get_rank() == 0:
        temporary = checkpoints / (_TEMPORARY_PREFIX + tag)
        sizes = {file.name: file.stat().st_size for file in sorted(temporary.iterdir())}
        (temporary / _STATE_FILE).write_text(json.dumps({**asdict(state), _SIZES: sizes}, indent=2) + "\n")
        _sync_files(temporary)
        shutil.rmtree(checkpoints / tag, ignore_errors=True)
        os.rename(temporary, checkpoints / tag)
        sync_to_disk(checkpoints)
        write_atomically(checkpoints / "latest", tag)
    dist.barrier()
    return checkpoints / tag


def find_resume(resume: str | None, checkpoints: Path) -> Path | None:
    """The `global_stepN` folder that `resume` means; None when nothing is to be resumed.

    Raises UserError when it is not there, is no training checkpoint, or is not whole.
    """
    if resume is None:
        return None
    path = checkpoints if resume == "latest" else Path(resume).expanduser()
    if (path / "latest").is_file():
        path = path / (path / "latest").read_text().strip()
    if not path.is_dir():
        raise UserError(f"resume={resume}: there is no checkpoint at {path}; leave resume out to start a new run")
    if path.name.startswith(_TEMPORARY_PREFIX) or not (path / _STATE_FILE).is_file():
        raise UserError(
            f"resume={resume}: {path} is no training checkpoint of this project, or a save that never ended (a whole one is named "
            f"global_stepN and holds {_STATE_FILE}); to start a new run from a folder's weights, give it as model_name_or_path"
        )
    _check_whole(path)
    return path


def read_state(step_dir: Path) -> TrainerState:
    return _read_state_file(step_dir)[0]


def _read_state_file(step_dir: Path) -> tuple[TrainerState, dict[str, int]]:
    """The state, and the size of each other file. Raises UserError when it cannot be read."""
    file = step_dir / _STATE_FILE
    try:
        content = json.loads(file.read_text())
        sizes = content.pop(_SIZES)
        return TrainerState(**content), sizes
    except (json.JSONDecodeError, AttributeError, KeyError, TypeError) as error:
        raise UserError(f"{file} cannot be read ({error}); the checkpoint is damaged, resume from another one") from None


def _check_whole(step_dir: Path) -> None:
    """Raises UserError for a file that is missing or has another size than it was saved with."""
    for name, size in _read_state_file(step_dir)[1].items():
        file = step_dir / name
        found = file.stat().st_size if file.is_file() else None
        if found != size:
            state = "missing" if found is None else f"damaged: {found} bytes, {size} were saved"
            raise UserError(f"resume: {file} is {state}; copy the checkpoint again, or resume from another one")


def check_resumable(saved: TrainerState, run: TrainerState, step_dir: Path) -> None:
    """Raises UserError, naming what differs, when `run` cannot go on from `saved`.

    Optimizer files fit the layout they were saved in; the other fields decide which samples come next.
    """
    names = ("num_stages", "dp_size", "global_batch_size", "micro_batch_size", "num_samples", "seed")
    differing = [f"{name} was {getattr(saved, name)}, is {getattr(run, name)}" for name in names if getattr(saved, name) != getattr(run, name)]
    if differing:
        raise UserError(
            f"resume: this run differs from the one that saved {step_dir}: {'; '.join(differing)}. Give the same values, "
            f"or start a new run from its weights with model_name_or_path={step_dir}"
        )


def load_checkpoint(engine: PipelineEngine, step_dir: Path, adapter_only: bool = False) -> None:
    """Restores weights, optimizer and counters into an engine of the same layout; `adapter_only` as in saving."""
    loaded, _ = engine.load_checkpoint(str(step_dir.parent), tag=step_dir.name, load_module_strict=not adapter_only)
    assert loaded is not None, f"DeepSpeed found nothing to load in {step_dir}"


def remove_leftovers(checkpoints: Path) -> None:
    """Deletes what saves that never ended have left."""
    for folder in checkpoints.glob(f"{_TEMPORARY_PREFIX}*"):
        shutil.rmtree(folder, ignore_errors=True)


def _sync_files(folder: Path) -> None:
    for path in (*folder.iterdir(), folder):
        sync_to_disk(path)
