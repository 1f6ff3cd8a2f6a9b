"""The line of steps of a run: its `checkpoints/` holds the steps that led to its current one, and no others.

A run that goes back to an earlier step, or starts from another folder's checkpoint, abandons the steps that its own
folder holds beyond that. They would be taken for its own: by `latest`, by `keep_last` and `keep_best`, as the best
checkpoint, by whatever restarts the run, and by its export. So they are set aside before the first step, with their
exports and records, in `checkpoints/abandoned/1` (`2` the next time, ...). That folder has the shape of `checkpoints/`:
a run can be resumed from it, and it can be evaluated and exported. Only `overwrite_output_dir=true` deletes it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from errors import UserError
from filesystem import copy_with_progress, sync_to_disk, write_atomically
from models.storage.steps import (
    LATEST_NAME,
    TEMPORARY_PREFIX,
    has_latest,
    is_step,
    list_checkpoints,
    read_latest,
    step_of,
)
from training.checkpoint.run_folder import RunFolder, find_inside
from training.config.schema import RunConfig

CONTINUES = ("latest", "auto")  # values of `resume` that continue the run of a folder where it is


@dataclass(frozen=True)
class Abandoned:
    """The steps and exports that a run abandons when it starts.

    start: the checkpoint of its own folder that it continues from; None if it continues from none of them. first_step:
    the step that it starts from. steps: folders `global_stepN`, the newest first. exports: folders of models.
    """

    start: Path | None
    first_step: int
    steps: list[Path]
    exports: list[Path]

    def __bool__(self) -> bool:
        return bool(self.steps or self.exports)

    def describe(self) -> str:
        """Return the names of the folders, and why they are set aside."""
        return f"{', '.join(path.name for path in self._folders)}, since the run starts from step {self.first_step}"

    def measure(self) -> int:
        """Return the bytes that the folders hold."""
        files = (file for folder in self._folders for file in folder.rglob("*"))
        return sum(file.stat().st_size for file in files if file.is_file() and not file.is_symlink())

    def check_inputs(self, sources: Iterable[tuple[str, Path]]) -> None:
        """Check what the run reads, each with its key. Raises UserError when that would be set aside."""
        if found := find_inside(sources, self._folders):
            key, folder = found
            raise UserError(
                f"resume: a start from step {self.first_step} sets {folder} aside, where {key} is; move that out of "
                f"{folder.name}, or give another output_dir"
            )

    @property
    def _folders(self) -> list[Path]:
        return [*self.steps, *self.exports]


def find_abandoned(folder: RunFolder, resume_from: Path | None) -> Abandoned:
    """Return what a run abandons that starts from the checkpoint `resume_from`, or from step 0 if that is None: the
    steps of its folder after that one, their exports, and the final export of a run that went further; all steps and
    exports if the checkpoint is another folder's."""
    first_step, start = 0 if resume_from is None else step_of(resume_from), find_own(folder, resume_from)
    led_here = 0 if start is None else first_step
    steps = [path for path in list_checkpoints(folder.checkpoints) if start is None or step_of(path) > led_here]
    exports = [path for step, path in folder.list_exports().items() if step > led_here]
    went_further = bool(steps) or folder.read_completed().get("step", 0) > led_here
    if went_further and folder.export.exists():
        exports.append(folder.export)
    return Abandoned(start, first_step, steps, exports)


def find_own(folder: RunFolder, step_dir: Path | None) -> Path | None:
    """Return the checkpoint of a run's own folder that `step_dir` is, by whatever path; None if it is another's."""
    if step_dir is None:
        return None
    return next((own for own in list_checkpoints(folder.checkpoints) if own.resolve() == step_dir.resolve()), None)


def set_aside(folder: RunFolder, abandoned: Abandoned) -> Path:
    """Move what the run abandons, each folder in one rename, with its id at trackers, and point `latest` to its start.
    Main rank only. Returns the new folder. What a start that dies meanwhile has not moved, the next one does."""
    place = _make_place(folder.abandoned)
    for file in _list_shared(folder):
        target = place / file.relative_to(folder.checkpoints)
        target.parent.mkdir(parents=True, exist_ok=True)
        _link(file, target)
    for file in (folder.metrics, folder.events, folder.completed, folder.tracker_id):
        if file.exists():
            shutil.copyfile(file, place / file.name)
    folder.reopen()
    latest = _choose_latest(folder.checkpoints, abandoned.steps)
    if abandoned.start is not None:
        write_atomically(folder.checkpoints / LATEST_NAME, abandoned.start.name)
    else:
        (folder.checkpoints / LATEST_NAME).unlink(missing_ok=True)
    folder.tracker_id.unlink(missing_ok=True)  # most trackers cannot drop figures: the new line gets a run of its own
    for path in abandoned.exports:
        # checkpoints/ may be a link to another file system
        shutil.move(path, place / path.name, copy_function=copy_with_progress)
    for path in abandoned.steps:
        os.rename(path, place / path.name)
    if latest is not None:
        write_atomically(place / LATEST_NAME, latest)
    for changed in (place, folder.abandoned, folder.checkpoints, folder.path):
        sync_to_disk(changed)
    return place


def announce_start(folder: RunFolder, keys: RunConfig) -> None:
    """Record the checkpoint that the run was told to start from, for a restart of one that dies before `record_start`:
    while it builds its stages, for example. Main rank only, once nothing refuses the start: `resume=auto` would go
    there."""
    if keys.resume not in CONTINUES:
        start = {"resume": name_start(keys.resume), "has_begun": False}
        folder.write_started({**start, "stop_after_steps": None, "last_step": 0})


def record_start(folder: RunFolder, keys: RunConfig, resume_from: Path | None, last_step: int) -> None:
    """Record how the run was started, for its restarts: those that continue it keep the checkpoint that it was told to
    start from. Main rank only."""
    before, named = folder.read_started(), name_start(keys.resume)
    if resume_from is not None and keys.resume in CONTINUES and before.get("has_begun"):
        named = before.get("resume")
    start = {"resume": named, "has_begun": True, "job": os.environ.get("SLURM_JOB_ID")}
    folder.write_started({**start, "stop_after_steps": keys.stop_after_steps, "last_step": last_step})


def name_start(resume: str | None) -> str | None:
    """Return the path that `resume` names, as `started.json` has it; None if it names none."""
    return None if resume in (None, *CONTINUES) else str(Path(resume).expanduser().resolve())


def find_last_step(folder: RunFolder, keys: RunConfig, step: int, total_steps: int) -> int:
    """Return the step that a run ends with. step: that of its start. A run with `stop_after_steps` that was interrupted
    and is continued ends where it was to end."""
    if keys.stop_after_steps is None:
        return total_steps
    last_step, started = step + keys.stop_after_steps, folder.read_started()
    was_interrupted = not folder.read_completed() and started.get("stop_after_steps") == keys.stop_after_steps
    if keys.resume in CONTINUES and was_interrupted and started["last_step"] >= step:
        last_step = started["last_step"]
    return min(total_steps, last_step)


def _make_place(abandoned: Path) -> Path:
    abandoned.mkdir(parents=True, exist_ok=True)
    numbers = [int(path.name) for path in abandoned.iterdir() if path.name.isdecimal()]
    place = abandoned / str(max(numbers, default=0) + 1)
    place.mkdir()
    return place


def drop_shared(folder: RunFolder) -> None:
    """Delete the files that all checkpoints of a run share, before a run that continues none of them writes its own:
    what it does not write too, such as the template or the adapter of a start that saved nothing, is not its own."""
    for file in list(_list_shared(folder)) if folder.checkpoints.is_dir() else ():
        file.unlink()


def _list_shared(folder: RunFolder) -> Iterator[Path]:
    """Yield the files that all checkpoints of a run share, those in folders included."""
    for entry in folder.checkpoints.iterdir():
        is_step_or_part = is_step(entry.name) or entry.name.startswith(TEMPORARY_PREFIX)
        if not is_step_or_part and entry.name not in (LATEST_NAME, folder.abandoned.name):
            yield from [entry] if entry.is_file() else (file for file in entry.rglob("*") if file.is_file())


def _link(file: Path, target: Path) -> None:
    """Give a file another name, or copy it where the file system has no such links."""
    try:
        os.link(file, target)
    except OSError:
        copy_with_progress(file, target)


def _choose_latest(checkpoints: Path, steps: list[Path]) -> str | None:
    """Return the name that `latest` holds if it is one of `steps`, else the newest one's; None without steps."""
    names = [path.name for path in steps]
    named = read_latest(checkpoints) if has_latest(checkpoints) else ""
    return named if named in names else next(iter(names), None)
