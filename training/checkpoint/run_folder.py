"""The folder of a run: who may write into it, and the paths of its files (the README lists them)."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import BaseFileLock

from errors import UserError, choose_ending
from filesystem import lock_file, write_atomically
from models.storage.steps import has_latest, list_checkpoints


class RunFolder:
    """A run's output_dir."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"
        self.abandoned = self.checkpoints / "abandoned"
        self.metrics = self.path / "metrics.jsonl"
        self.events = self.path / "events.jsonl"
        self.facts = self.path / "run.json"
        self.report = self.path / "report.html"
        self.skipped = self.path / "skipped.txt"  # the records that were skipped as bad
        self.export = self.path / "hf"
        self.plan = self.path / "plan.txt"
        self.started = self.path / "started.json"
        self.completed = self.path / "completed.json"
        self.ended = self.path / "ended.json"  # why a run has ended before it had finished
        self.tracker_id = self.path / "tracker_run_id"
        self._lock: BaseFileLock | None = None

    def find_checkpoint(self, step: int) -> Path:
        """Return the path of a step's checkpoint, which need not exist."""
        return self.checkpoints / f"global_step{step}"

    def find_export(self, step: int) -> Path:
        """Return the path of the export of a step of `export_steps`, which need not exist."""
        return self.path / f"{self.export.name}-step{step}"

    def list_exports(self) -> dict[int, Path]:
        """Return the exports of steps of `export_steps` that exist, by step."""
        pattern = re.compile(rf"{self.export.name}-step(\d+)")
        found = {int(match[1]): path for path in self.path.glob("*") if (match := pattern.fullmatch(path.name))}
        return dict(sorted(found.items()))

    def check_writable(self) -> None:
        """Check permissions. Raises UserError for a folder that cannot be written."""
        existing = next(path for path in (self.path.absolute(), *self.path.absolute().parents) if path.exists())
        if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
            raise UserError(
                f"output_dir={self.path} cannot be written: {existing} is "
                f"{'read-only' if existing.is_dir() else 'a file'}; give another one"
            )

    def check_usable(self, resuming: bool, overwrite: bool) -> None:
        """Check the folder for a run. Raises UserError when it cannot be written, or when this run would overwrite its
        checkpoints, or the export of a finished run whose checkpoints were removed."""
        self.check_writable()
        if resuming or overwrite:
            return
        if has_latest(self.checkpoints) or list_checkpoints(self.checkpoints):
            raise UserError(
                f"output_dir={self.path} holds checkpoints of an earlier run; continue with resume=latest, "
                "or start over with overwrite_output_dir=true (deletes them), or give another output_dir"
            )
        if self.read_completed() and self.export.exists():
            raise UserError(
                f"output_dir={self.path} holds the export of a finished run, whose checkpoints are not there; give "
                "another output_dir, or start over with overwrite_output_dir=true (deletes it)"
            )

    def check_keeps(self, sources: Iterable[tuple[str, Path]], overwrite: bool) -> None:
        """Check what the run reads, each with its key; links are followed. Raises UserError when the run would write
        over it, or starting over (`overwrite`) would delete it."""
        written = (self.completed, self.ended, self.plan, self.path / "config.yaml")
        folders = [*self._list_folders(), *self._list_files(), *written]
        if found := find_inside(sources, folders):
            key, doomed = found
            if not overwrite:
                raise UserError(
                    f"the run would write over {doomed}, where {key} is; give another output_dir, or move it"
                )
            raise UserError(
                f"overwrite_output_dir=true would delete {doomed}, where {key} is; give another output_dir, or move it"
            )

    def acquire_lock(self) -> None:
        """Lock the folder for this process until `release_lock`. Main rank only.

        It is a kernel lock, which is released when the process ends, however it ends. Raises UserError when another run
        holds it, or the file system has no locks.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = lock_file(self.path / ".lock")
        except BlockingIOError:
            raise UserError(
                f"output_dir={self.path} is in use by another run that has not ended; give another output_dir"
            ) from None
        except OSError as error:
            raise UserError(
                f"output_dir={self.path} cannot be locked: {error.strerror or error}; give one that can be written, on "
                "a file system that has locks (some NFS mounts have none)",
                choose_ending(error),
            ) from None

    @contextmanager
    def claim(self) -> Iterator[bool]:
        """Yield whether a command that ends before it is a run may write into the folder, which is created: no run is
        at work in it, and none begins to be within this context, and none has finished there."""
        try:
            if self.completed.exists():
                raise BlockingIOError
            self.path.mkdir(parents=True, exist_ok=True)
            lock = lock_file(self.path / ".lock")
        except OSError:
            yield False
            return
        try:
            yield True
        finally:
            lock.release()

    def clear(self) -> None:
        """Delete the checkpoints, exports, metrics and report of an earlier run, and its id at trackers. A link stays;
        what it leads to is deleted.

        Raises UserError for what cannot be deleted.
        """
        try:
            for folder in self._list_folders():
                _delete_folder(folder)
            for file in self._list_files():
                file.resolve().unlink(missing_ok=True)
        except OSError as error:
            raise UserError(
                f"overwrite_output_dir=true: {error.filename} cannot be deleted: {error.strerror}; delete "
                f"{self.path} yourself, or give another output_dir"
            ) from None

    def measure(self) -> int:
        """Return the bytes that `clear` would free."""
        files = (file for folder in self._list_folders() for file in folder.resolve().rglob("*"))
        return sum(file.lstat().st_size for file in files if not file.is_symlink() and file.is_file())

    def _list_files(self) -> tuple[Path, ...]:
        """Return the files that `clear` deletes."""
        return (self.metrics, self.events, self.facts, self.report, self.skipped, self.started, self.tracker_id)

    def _list_folders(self) -> Iterator[Path]:
        """Yield the folders that `clear` deletes."""
        yield from (self.checkpoints, self.export)
        yield from sorted(self.path.glob(f"{self.export.name}-step*"))

    def release_lock(self) -> None:
        """Release the lock, if this process holds it."""
        if self._lock is not None:
            self._lock.release()

    def read_started(self) -> dict[str, Any]:
        """Return the record of how the run here was started; empty if there is none. See `write_started`."""
        return _read_record(self.started, "last_step")

    def write_started(self, record: dict[str, Any]) -> None:
        """Write how the run was started, for its restarts.

        record: `resume`, the path of the checkpoint that it was told to start from, or None; `has_begun`, whether it is
        about to train from there; `job`, Slurm's number of the job that has; `stop_after_steps`; `last_step`, the
        step that it ends with.
        """
        write_atomically(self.started, json.dumps(record, indent=2) + "\n")

    def read_completed(self) -> dict[str, Any]:
        """Return the completion record of a run that has ended here, its export included; empty where there is none."""
        return _read_record(self.completed, "step")

    def read_ended(self) -> dict[str, Any]:
        """Return why the run here has ended before it had finished (`training/distributed/ending.py`); empty where that
        is not known."""
        return _read_record(self.ended, "code")

    def confirm_completed(self) -> None:
        """Update the completion record's modification time, for processes that wait for a new one."""
        os.utime(self.completed)

    def drop_records(self) -> None:
        """Delete the metrics and events: those of steps that did not lead to where the run starts."""
        for file in (self.metrics, self.events):
            file.resolve().unlink(missing_ok=True)

    def reopen(self) -> None:
        """Delete the completion record: a run begins to train here."""
        self.completed.unlink(missing_ok=True)

    def write_completed(self, record: dict[str, Any]) -> None:
        """Write the completion record: supervisors of the run read this, not the launcher's exit code.

        record: `step`, the last one; `num_tokens` that the run has seen, without padding; the metrics of that step's
        evaluation, if it had one; `best_step` and `best_metric` where the best step is exported; `ended_by`, in words.
        """
        write_atomically(self.completed, json.dumps(record, indent=2) + "\n")


def _read_record(file: Path, number: str) -> dict[str, Any]:
    """Return the JSON object in a file; empty if it cannot be read, or has no integer `number`."""
    try:
        record = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) and isinstance(record.get(number), int) else {}


def find_inside(sources: Iterable[tuple[str, Path]], folders: Iterable[Path]) -> tuple[str, Path] | None:
    """Return the first source, by its key, that is in one of the folders, and that folder; None when none is."""
    places = {place: folder for folder in folders for place in (folder.absolute(), folder.resolve())}
    for key, source in sources:  # there may be a hundred thousand
        for path in (source.absolute(), source.resolve()):
            if (inside := next((each for each in (path, *path.parents) if each in places), None)) is not None:
                return key, places[inside]
    return None


def _delete_folder(folder: Path) -> None:
    """Delete a folder; of a link to one, what is in it. Does nothing where there is none."""
    if not folder.is_symlink():
        if folder.exists():
            shutil.rmtree(folder)
        return
    for entry in folder.iterdir() if folder.exists() else ():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
