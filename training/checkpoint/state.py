"""The content of training checkpoints.

    checkpoints/  latest  config.json  tokenizer files  global_stepN/
    global_stepN/ layer_XX-model_states.pt       weights in the training dtype, one file per layer
                  optimizer-stage_XX-dp_YY.safetensors   see training/checkpoint/optimizer_state.py
                  mp_rank_00_model_states.pt     empty; DeepSpeed's own load_checkpoint(load_module_only=True) requires
                                                 it
                  trainer_state.json             the run's progress
                  evaluation.json                of a step that was evaluated after it had been saved
                  manifest.json                  size and hash of each file; see models/storage/manifest.py

No file depends on the layout that wrote it, so a run resumes at any other. Random numbers, learning rate and sample
order are functions of the step, so the step is the only state in addition to the tensors; a run that streams its data
keeps where in its shards the step is, which would take a pass over them to find. Nothing in a checkpoint is
unpickled but tensors (`weights_only=True`). `training/checkpoint/writer.py` writes checkpoints,
`training/checkpoint/resume.py` chooses the one that a run resumes from.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from errors import UserError
from filesystem import write_atomically
from masking import mask
from models.storage.manifest import STATE_NAME
from models.storage.steps import TEMPORARY_PREFIX
from training.checkpoint import optimizer_state
from training.checkpoint.best import Best
from training.checkpoint.master_weights import restore_rounded
from training.engine.engine import Engine

EVALUATION_NAME = "evaluation.json"
FORMAT = 7  # increase it when an older version of the project could not read what this one writes


@dataclass(frozen=True)
class Identity:
    """Identifies a model or a tokenizer that a run began with.

    fingerprint: a hash of its content. place: its path, or `org/name@COMMIT` for a model of the hub. as_1_1: the
    fingerprint of a model as version 1.1 stored it, which covers less; empty for a tokenizer.
    """

    fingerprint: str
    place: str
    as_1_1: str = ""


@dataclass(frozen=True, kw_only=True)
class TrainerState:
    """A run's progress, and the settings that it must keep to continue."""

    step: int  # optimizer steps done
    num_tokens: int  # seen so far, without padding
    num_stages: int  # of the layout that saved it; a resume may have another one
    dp_size: int  # as num_stages: replicas of that layout
    global_batch_size: int  # in what the order shuffles: samples, groups that stay together (pairs), or packed rows
    micro_batch_size: int  # as num_stages, in the unit of global_batch_size
    num_samples: int  # of train_file, in the same unit; 0 for a stream
    total_steps: int  # the length of the learning rate schedule
    seed: int
    precision: str = ""  # the key's value
    optimizer: str = ""  # the optimizer and its state's form, by `describe_optimizer`
    data: dict[str, str] = field(default_factory=dict)  # what decides the loss: `describe_data`, `describe_objective`
    evaluation: dict[str, float] = field(default_factory=dict)  # of this step; empty where it was not evaluated
    evaluated_on: str = ""  # a hash of the evaluation files' tokens; empty where there is none, and before format 4
    best: Best | None = None  # of the evaluations so far
    identity: dict[str, Identity] = field(default_factory=dict)  # of tokenizer, base, reference, auxiliary model
    stream: dict[str, Any] = field(default_factory=dict)  # of a run that streams its data: shards and cursor
    extensions: list[str] = field(default_factory=list)  # of users, by name: those that the run was started with
    weights_only: bool = False  # `save_weights_only`: without the optimizer's state
    format: int = FORMAT  # of the file that it was read from

    def __post_init__(self) -> None:
        object.__setattr__(self, "data", mask(self.data))  # of components, whose fields may be secret


def read_state(step_dir: Path) -> TrainerState:
    """Read a checkpoint's trainer_state.json, and evaluation.json in place of its evaluation. Raises UserError when one
    cannot be read, or was written by a newer version of this project."""
    file = step_dir / STATE_NAME
    try:
        content = json.loads(file.read_text())
        if (step_dir / EVALUATION_NAME).is_file():
            content |= json.loads((step_dir / EVALUATION_NAME).read_text())
        if content.get("format", FORMAT) > FORMAT:
            raise UserError(
                f"{file} was written by a newer version of this project (format {content['format']}, this one reads "
                f"{FORMAT}); update the project"
            )
        return TrainerState(**_modernize(content))
    except (OSError, ValueError, AttributeError, TypeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"{file} cannot be read ({error}); the checkpoint is damaged, resume from another one"
        ) from None


def record_evaluation(step_dir: Path, state: TrainerState) -> None:
    """Record the evaluation of a step that is saved already: a signal had interrupted it, or it was not due then. It is
    written next to the state, into `evaluation.json`. Raises OSError."""
    fields = asdict(state)
    found = {name: fields[name] for name in ("evaluation", "evaluated_on", "best")}
    write_atomically(step_dir / EVALUATION_NAME, json.dumps(found, indent=2) + "\n")


def _modernize(content: dict[str, Any]) -> dict[str, Any]:
    """Convert the fields of format 1 to the current ones, and of JSON to their types. Format 2 has no identity,
    3 no hash of the evaluation files, 4 no stream, 5 no shards of two dimensions, and 6 no user-defined components and
    fingerprints of the older form."""
    known = dict(content)
    eval_loss = known.pop("eval_loss", None)
    if eval_loss is not None:
        known["evaluation"] = {"eval_loss": eval_loss}
    if known.get("best") is not None:
        known["best"] = Best(**known["best"])
    known["identity"] = {name: Identity(**fields) for name, fields in known.get("identity", {}).items()}
    return {"format": 1} | known


def load_checkpoint(engine: Engine, step_dir: Path, state: TrainerState) -> None:
    """Restore the optimizer and the counters of an engine of any layout, whose weights `StageModule` has read from
    `step_dir`.

    state: where this run starts. Raises UserError when the optimizer's state is incomplete.
    """
    same_optimizer = read_state(step_dir).optimizer == state.optimizer
    optimizer_state.load_state(engine, step_dir, with_moments=same_optimizer)
    restore_rounded(engine, step_dir)
    engine.restore_step(state.step)


def remove_leftovers(checkpoints: Path) -> None:
    """Delete the remains of saves and deletions that were interrupted."""
    for folder in checkpoints.glob(f"{TEMPORARY_PREFIX}*"):
        shutil.rmtree(folder, ignore_errors=True)
