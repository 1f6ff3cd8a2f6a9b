"""Chooses the checkpoint that a run resumes from, the newest complete one, and checks that the run matches it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from console import progress
from errors import UserError
from extension import OWN_FOLDERS
from models.storage.manifest import (
    MANIFEST_NAME,
    STATE_NAME,
    describe_missing,
    find_wrong_content,
    find_wrong_size,
    has_manifest,
    is_trained,
    read_manifest,
)
from models.storage.steps import (
    TEMPORARY_PREFIX,
    find_damaged_latest,
    has_latest,
    is_step,
    list_checkpoints,
    read_latest,
    step_of,
)
from training.checkpoint.run_folder import RunFolder
from training.checkpoint.state import TrainerState
from training.distributed.ranks import raise_together

# The fields that determine which samples come next and what a step does with them. The layout does not.
_KEPT = ("global_batch_size", "num_samples", "seed", "precision", "optimizer")
IN_4BIT = "adapter.load_in_4bit"
# Values of `describe_objective` and `describe_stream` that a state before format 7 lacks, or has in another form.
_RECORDED_SINCE_7 = (
    IN_4BIT,
    "data.collator",
    "loss",
    "the hash of encoder, tokenizer and their options",
)


@dataclass(frozen=True)
class Resumable:
    """The checkpoints that `resume` may refer to.

    candidates: those that are complete by names and sizes, the preferred one first. damages: what is wrong with those
    that would be preferred to all of them.
    """

    candidates: list[Path]
    damages: list[str]


def choose_resume(resume: str | None, folder: RunFolder) -> str | None:
    """Return what `auto` means; other values unchanged. For a run that was told to start from a checkpoint and has not
    started, or has saved nothing since, it is that checkpoint; else `latest` if there are any, or None."""
    if resume != "auto":
        return resume
    is_saved, started = bool(list_checkpoints(folder.checkpoints)), folder.read_started()
    has_lost_start = not started.get("has_begun") or not (is_saved or folder.read_completed())
    if has_lost_start and started.get("resume") is not None:
        return started["resume"]
    return "latest" if is_saved else None


def find_resume(resume: str, checkpoints: Path, trust: bool) -> Resumable:
    """Return the checkpoints to resume from. For `latest`, or a folder that holds it: that checkpoint, then those
    before it, newest first, then those after it. For the path of a checkpoint: that one.

    trust: accept one that has no manifest at all. Raises UserError when there is no checkpoint, none of a training run,
    or none that is complete.
    """
    path = checkpoints if resume == "latest" else Path(resume).expanduser()
    named = _list_candidates(path)
    if not any(candidate.is_dir() for candidate in named):
        raise UserError(
            f"resume={resume}: there is no checkpoint at {named[0] if named else path}; omit resume to start a new run"
        )
    first = named[0]
    if first.is_dir() and (first.name.startswith(TEMPORARY_PREFIX) or not is_trained(first)):
        raise UserError(
            f"resume={resume}: {first} is not a training checkpoint of this project, or a save that never ended (a "
            f"complete one is named global_stepN and holds {STATE_NAME}); to start a new run from a folder's weights, "
            "give it as model_name_or_path"
        )
    found = {candidate: _find_quick_damage(candidate, trust) for candidate in named}
    whole = [candidate for candidate, damage in found.items() if damage is None]
    passed_over = named[: named.index(whole[0])] if whole else named
    damages = [damage for candidate in passed_over if (damage := found[candidate]) is not None]
    if damage := find_damaged_latest(path):
        damages.insert(0, damage)
    if not whole:
        raise damaged_error(damages)
    return Resumable(whole, damages)


def damaged_error(damages: list[str]) -> UserError:
    """Return the error for damaged checkpoints, when none is complete. damages: the first one is quoted."""
    others = " (none of the others there is complete)" if len(damages) > 1 else ""
    return UserError(f"resume: {damages[0]}; copy the checkpoint again, or resume from another one{others}")


def _list_candidates(path: Path) -> list[Path]:
    if is_step(path.name) or path.name.startswith(TEMPORARY_PREFIX):
        return [path]
    found = list_checkpoints(path)
    if not has_latest(path) or find_damaged_latest(path):
        return found
    latest = path / read_latest(path)
    step = step_of(latest) if latest in found else 0
    return [
        latest,
        *(other for other in found if step_of(other) < step),
        *(other for other in found if step_of(other) > step),
    ]


def _find_quick_damage(step_dir: Path, trust: bool) -> str | None:
    if not step_dir.is_dir():
        return f"{step_dir} is missing"
    if not has_manifest(step_dir):
        return None if trust else describe_missing(step_dir)
    return find_wrong_size(step_dir)


def find_damage(step_dir: Path, rank: int, world_size: int) -> str | None:
    """Return, in words, what is wrong with this rank's share of the files; None when nothing is. The shares of all
    ranks are the whole checkpoint. Reads every byte."""
    records = read_manifest(step_dir)
    if records is None:
        return None if not has_manifest(step_dir) else f"{step_dir / MANIFEST_NAME} is damaged"
    by_size = sorted(records, key=lambda name: (records[name].size, name))  # so that shares are about equal
    share = by_size[rank::world_size]
    with progress(f"checking {step_dir.name}", len(share), "files", shown=rank == 0) as bar:
        return find_wrong_content(step_dir, bar.follow(share))


def choose_whole(resumable: Resumable, say: Callable[[str], None]) -> Path:
    """Return the first candidate whose bytes are those that were saved; each rank reads a share of them. All ranks call
    it, in a process group.

    say: prints what is wrong with the preferred ones. Raises UserError when none is complete.
    """
    damages = list(resumable.damages)
    for chosen in resumable.candidates:
        found: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(found, find_damage(chosen, dist.get_rank(), dist.get_world_size()))
        if not any(found):
            break
        damages.append(next(filter(None, found)))
    else:
        raise_together(damaged_error(damages))
    for text in [*damages, f"going back to {chosen}, the newest complete checkpoint"] if damages else []:
        say(f"resume: {text}")
    return chosen


def check_resumable(saved: TrainerState, run: TrainerState, step_dir: Path, allow_changes: bool = False) -> list[str]:
    """Return, in words, the settings that differ between the saved run and this one, and what could not be compared.
    The layout may differ freely.

    Raises UserError for a checkpoint of weights alone and, unless `allow_changes`, for any difference.
    """
    before, after = ({name: getattr(state, name) for name in _KEPT} | state.data for state in (saved, run))
    if saved.weights_only:
        raise UserError(
            f"resume: {step_dir} holds weights alone (save_weights_only=true), and no run can continue from them; "
            f"start a new one with model_name_or_path={step_dir}"
        )
    missing = [name for name in saved.extensions if name not in run.extensions]
    if missing and not allow_changes:
        raise UserError(
            f"resume: {step_dir} was trained with the extensions {', '.join(missing)}; name their folders in "
            f"{OWN_FOLDERS}, or continue without them with resume_allow_changes=true"
        )
    unknown = _RECORDED_SINCE_7 if saved.format < 7 else ()
    differing = [
        f"{name} was {before.get(name, 'none')}, is {after.get(name, 'none')}"
        for name in {**before, **after}
        if before.get(name) != after.get(name) and name not in unknown
    ]
    others, notes = _list_others(saved, run), _list_sampled(saved, run)
    notes += [
        f"{step_dir} was saved by an earlier version: no comparison of {name}" for name in unknown if name in after
    ]
    if differing and not allow_changes:  # first: a key that adds tokens changes the tokenizer too
        raise UserError(
            f"resume: this run differs from the one that saved {step_dir}: {'; '.join(differing)}. Give the same "
            "values, or continue anyway with resume_allow_changes=true, or start a new run from its weights with "
            f"model_name_or_path={step_dir}"
        )
    if others and not allow_changes:
        raise UserError(
            f"resume: {'; '.join(others)}, whose content differs; {step_dir} was trained with the first one. Give that "
            "one, or continue anyway with resume_allow_changes=true"
        )
    return others + differing + notes


def check_evaluated(saved: TrainerState, in_4bit: bool, allow_changes: bool = False) -> None:
    """Check that an evaluation with the adapter of a checkpoint has the frozen weights that its run has had. in_4bit:
    whether it has them in 4 bits. Raises UserError unless `allow_changes`."""
    was_in_4bit = saved.data.get(IN_4BIT) == "true"
    if was_in_4bit != in_4bit and saved.format >= 7 and not allow_changes:
        was, now = (str(each).lower() for each in (was_in_4bit, in_4bit))
        raise UserError(
            f"resume: {IN_4BIT} was {was}, is {now}; give the same, or evaluate the adapter on the other weights with "
            "resume_allow_changes=true"
        )


def _list_others(saved: TrainerState, run: TrainerState) -> list[str]:
    """Return, in words, what both runs name and know by other content: base model, reference model, tokenizer."""
    return [
        f"the {name} was {before.place}, is {run.identity[name].place}"
        for name, before in saved.identity.items()
        if name in run.identity
        and before.fingerprint not in (run.identity[name].fingerprint, run.identity[name].as_1_1)
    ]


def _list_sampled(saved: TrainerState, run: TrainerState) -> list[str]:
    """Return, in words, the models that are known to be the same by a fingerprint of version 1.1 alone."""
    return [
        f"the {name} is that of before by the fingerprint of version 1.1, which does not cover every tensor"
        for name, after in run.identity.items()
        if name in saved.identity and saved.identity[name].fingerprint == after.as_1_1
    ]
