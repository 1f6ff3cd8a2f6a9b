"""Training checkpoints: what lies in one, and which one a run goes on from.

    checkpoints/  latest  config.json  tokenizer files  global_stepN/
    global_stepN/ layer_XX-model_states.pt       weights in the training dtype, one file a layer
                  optimizer-stage_XX-dp_YY.safetensors   see training/optimizer_state.py
                  mp_rank_00_model_states.pt     nothing; DeepSpeed's own load_checkpoint(load_module_only=True) asks for it
                  trainer_state.json             where the run stands
                  manifest.json                  size and hash of each file; see training/manifest.py

No file depends on the layout that wrote it, so a run goes on at any other. Random numbers, learning rate and sample order are functions of
the step, so the step is all the state there is beside the tensors. Nothing in a checkpoint is unpickled but tensors (`weights_only=True`).
`training/checkpoint_writer.py` writes them.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from deepspeed.runtime.pipe.engine import PipelineEngine

from errors import UserError
from training import optimizer_state
from training.manifest import MANIFEST_NAME, find_wrong_content, find_wrong_size, read_manifest

STATE_NAME = "trainer_state.json"
TEMPORARY_PREFIX = "tmp-"
FORMAT = 1  # raise it when an older project could not read what this one writes


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
    precision: str = ""
    optimizer: str = ""
    eval_loss: float | None = None  # of this step; None where it was not evaluated
    format: int = FORMAT


# What decides which samples come next and what a step does with them. The layout does not.
_KEPT = ("global_batch_size", "num_samples", "seed", "precision", "optimizer")


def list_checkpoints(checkpoints: Path) -> list[Path]:
    """The `global_stepN` folders, newest step first, whole or not."""
    found = [path for path in checkpoints.glob("global_step*") if re.fullmatch(r"global_step\d+", path.name)]
    return sorted(found, key=step_of, reverse=True)


def step_of(step_dir: Path) -> int:
    return int(step_dir.name.removeprefix("global_step"))


@dataclass(frozen=True)
class Resumable:
    """What `resume` may mean: checkpoints that are whole as far as names and sizes tell, the best first; what is wrong with better ones."""

    candidates: list[Path]
    damages: list[str]


def find_resume(resume: str, checkpoints: Path, trust: bool) -> Resumable:
    """`latest`, or a folder that holds it: that checkpoint, else those before it, newest first, else those after it. A path: that one.

    trust: take one that has no manifest at all. Raises UserError when there is none, none of a training run, or none that is whole.
    """
    path = checkpoints if resume == "latest" else Path(resume).expanduser()
    named = _list_candidates(path)
    if not any(candidate.is_dir() for candidate in named):
        raise UserError(f"resume={resume}: there is no checkpoint at {named[0] if named else path}; leave resume out to start a new run")
    first = named[0]
    if first.is_dir() and (first.name.startswith(TEMPORARY_PREFIX) or not any((first / name).exists() for name in (STATE_NAME, MANIFEST_NAME))):
        raise UserError(
            f"resume={resume}: {first} is no training checkpoint of this project, or a save that never ended (a whole one is named "
            f"global_stepN and holds {STATE_NAME}); to start a new run from a folder's weights, give it as model_name_or_path"
        )
    found = {candidate: _find_quick_damage(candidate, trust) for candidate in named}
    whole = [candidate for candidate, damage in found.items() if damage is None]
    passed_over = named[: named.index(whole[0])] if whole else named
    damages = [damage for candidate in passed_over if (damage := found[candidate]) is not None]
    if not whole:
        raise damaged_error(damages)
    return Resumable(whole, damages)


def damaged_error(damages: list[str]) -> UserError:
    others = " (none of the others there is whole)" if len(damages) > 1 else ""
    return UserError(f"resume: {damages[0]}; copy the checkpoint again, or resume from another one{others}")


def _list_candidates(path: Path) -> list[Path]:
    if re.fullmatch(r"global_step\d+", path.name) or path.name.startswith(TEMPORARY_PREFIX):
        return [path]
    found = list_checkpoints(path)
    if not (path / "latest").is_file():
        return found
    latest = path / (path / "latest").read_text().strip()
    step = step_of(latest) if latest in found else 0
    return [latest, *(other for other in found if step_of(other) < step), *(other for other in found if step_of(other) > step)]


def _find_quick_damage(step_dir: Path, trust: bool) -> str | None:
    if not step_dir.is_dir():
        return f"{step_dir} is missing"
    if not (step_dir / MANIFEST_NAME).exists():
        return None if trust else f"{step_dir} has no {MANIFEST_NAME}: it is not whole, or not from this project (trust_checkpoint=true takes it as it is)"
    return find_wrong_size(step_dir)


def find_damage(step_dir: Path, rank: int, world_size: int) -> str | None:
    """What is wrong with this rank's share of the files, in words; the shares of all ranks make the whole checkpoint. Reads every byte."""
    records = read_manifest(step_dir)
    if records is None:
        return None if not (step_dir / MANIFEST_NAME).exists() else f"{step_dir / MANIFEST_NAME} is damaged"
    by_size = sorted(records, key=lambda name: (records[name].size, name))  # so that shares are about equal
    return find_wrong_content(step_dir, by_size[rank::world_size])


def read_state(step_dir: Path) -> TrainerState:
    """Raises UserError when it cannot be read, or was written by a newer version of this project."""
    file = step_dir / STATE_NAME
    try:
        content = json.loads(file.read_text())
        if content.get("format", FORMAT) > FORMAT:
            raise UserError(f"{file} was written by a newer version of this project (format {content['format']}, this one reads {FORMAT}); update the project")
        return TrainerState(**content)
    except (OSError, ValueError, AttributeError, TypeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{file} cannot be read ({error}); the checkpoint is damaged, resume from another one") from None


def check_resumable(saved: TrainerState, run: TrainerState, step_dir: Path, allow_changes: bool = False) -> list[str]:
    """What differs in what the run means, in words. The layout may differ freely.

    Raises UserError, naming all of it, unless `allow_changes`.
    """
    differing = [f"{name} was {getattr(saved, name)}, is {getattr(run, name)}" for name in _KEPT if getattr(saved, name) != getattr(run, name)]
    if differing and not allow_changes:
        raise UserError(
            f"resume: this run differs from the one that saved {step_dir}: {'; '.join(differing)}. Give the same values, "
            f"or go on all the same with resume_allow_changes=true, or start a new run from its weights with model_name_or_path={step_dir}"
        )
    return differing


def load_checkpoint(engine: PipelineEngine, step_dir: Path, state: TrainerState) -> None:
    """Restores the optimizer and the counters of an engine of any layout, whose weights `StageModule` has read from `step_dir`.

    state: where this run starts. Raises UserError when the optimizer's state is not all there.
    """
    same_optimizer = read_state(step_dir).optimizer == state.optimizer
    optimizer_state.load_state(engine.module, engine.optimizer, step_dir, with_moments=same_optimizer)
    engine.global_steps = state.step
    engine.global_samples = state.step * state.global_batch_size


def remove_leftovers(checkpoints: Path) -> None:
    """Deletes what saves and deletions that never ended have left."""
    for folder in checkpoints.glob(f"{TEMPORARY_PREFIX}*"):
        shutil.rmtree(folder, ignore_errors=True)
