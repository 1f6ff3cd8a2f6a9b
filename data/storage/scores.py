"""The scores that a model gives the data once, such as a reference's log-probabilities.
They are kept next to the tokens.

`KEY/NAME-ID/`, for N values of each column: one per target, numbered row by row, or one per sample.

    COLUMN.bin          [N, ...], with the dtype and shape of the column (`batch.py`)
    description.json    what the values were made from, and what was noted of them when they were complete
    hashes.json         of these files

ID is a hash of what the values depend on: the model by content, the samples, their rows, and settings. While it is
written, the folder is `NAME-ID.part`, or `NAME-ID.HOST.part` for values per sample, with the number of rows that are
done, so that an interrupted pass continues at any layout. It gets its name by a rename.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import json
import os
import secrets
import shutil
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from filelock import BaseFileLock

from batch import Column, Per
from data.storage.disk import describe_bytes
from data.storage.hashes import find_changed, write_hashes
from data.storage.rows import RowPlan, Rows
from data.storage.tokenized import column_file, find_damage, load_summary
from errors import Ending, UserError
from filesystem import discard_folder, lock_file, publish_folder, write_atomically

DESCRIPTION, PROGRESS = "description.json", "progress.json"
_SECONDS_BETWEEN_COMMITS = 60.0


def count_bytes(columns: Sequence[Column]) -> int:
    """Return the bytes on disk of one value of each column."""
    return sum(column.dtype.itemsize * int(np.prod(column.shape)) for column in columns)


@dataclass(frozen=True)
class Scores:
    """The columns that a model scores in a tokenized folder, and the folder that holds them, or will."""

    folder: Path
    columns: tuple[Column, ...]
    plan: RowPlan  # by which the samples become rows
    num_values: int  # of each column
    made_from: Mapping[str, Any]  # what the values depend on, JSON values

    @property
    def name(self) -> str:
        return self.folder.name.partition("-")[0]

    @property
    def per(self) -> Per:
        """The unit of the values: a target or a document, the same for all columns."""
        return self.columns[0].per

    @property
    def is_small(self) -> bool:
        """Whether there is one value per sample, each in a row of its own. Runs may then write the same ones at a time,
        and each host has a copy."""
        return self.per is Per.document

    @property
    def num_bytes(self) -> int:
        return self.num_values * count_bytes(self.columns)

    def is_whole(self, compares_bytes: bool = True) -> bool:
        """Return whether the folder holds all values, as they were written. compares_bytes: read all bytes."""
        try:
            sizes = [self.find_file(self.folder, column).stat().st_size for column in self.columns]
            expected = [self.num_values * count_bytes([column]) for column in self.columns]
            return sizes == expected and find_changed(self.folder, compares_bytes) is None
        except (OSError, ValueError, TypeError, AttributeError):
            return False

    def find_file(self, folder: Path, column: Column) -> Path:
        """Return the file of a column. It has no prefix that is the folder's name too."""
        return column_file(folder, column.name.removeprefix(f"{self.name}_"))

    def map(self, folder: Path, column: Column, mode: str) -> np.ndarray:
        """Return a column in `folder`, memory-mapped, [N, ...]. mode: as of `numpy.memmap`."""
        dtype = torch.empty(0, dtype=column.dtype).numpy().dtype
        values = np.memmap(self.find_file(folder, column), dtype, mode=mode)  # type: ignore[call-overload]
        return values.reshape(-1, *column.shape)

    def load(self) -> list[np.ndarray]:
        """Return a copy of all values."""
        return [np.array(self.map(self.folder, column, "r")) for column in self.columns]


def find_scores(
    name: str, path: Path, plan: RowPlan, columns: tuple[Column, ...], model_id: str, **settings: Any
) -> Scores:
    """Return the scores of a tokenized folder.

    They are looked for in the folder `path` and then in those beside it whose samples are the same: an update may
    tokenize the same samples again under another key. The folders beside that of companions, which is in a tokenized
    one, are in the tokenized ones beside that. Where there are none yet, their place is in `path`.

    name: begins the name of their folder. model_id: a hash of the model, and of what it computes with. settings: what
    else the values depend on, JSON values.
    """
    samples, rows = load_summary(path).fingerprints, Rows(path, plan, False, False)
    rows_name = "" if plan.is_trivial else plan.folder(path).name
    made_from = {"model": model_id, "samples": samples, "rows": rows_name, **settings}
    digest = hashlib.sha256(repr(tuple(made_from.values())).encode()).hexdigest()[:16]
    num_values = int(rows.num_targets.sum(dtype=np.int64)) if columns[0].per is Per.target else len(rows)
    own = path / f"{name}-{digest}"
    is_within = find_damage(path.parent, compares_bytes=False) is None
    beside = path.parent.parent.glob(f"*/{path.name}/{own.name}") if is_within else path.parent.glob(f"*/{own.name}")
    others = sorted(beside) if samples else []
    folder = next((each for each in (own, *others) if each.exists()), own)
    return Scores(folder, columns, plan, num_values, made_from)


def _reserve(descriptor: int, nbytes: int) -> None:
    """Take the room of a file on its disk, where its file system can: a write to mapped memory that finds none ends the
    process with SIGBUS."""
    if hasattr(os, "posix_fallocate"):  # not on macOS
        try:
            os.posix_fallocate(descriptor, 0, nbytes)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise


class ScoresWriter:
    """Writes scores, rows in a fixed order. One process of the run has it.

    rows_done: of an earlier pass that was interrupted. values: the columns, memory-mapped.
    """

    _lock: BaseFileLock | None = None

    def __init__(self, scores: Scores, key: str, values: str = "the scores", fewer: str = "") -> None:
        """key, values: what messages call the data and the scores. fewer: see `Scorer`. Raises
        UserError where the disk has no room, or another run writes scores that are not small, or has written
        them since this one looked; OSError where the disk fails."""
        self._scores, self._key, self._values, self._fewer = scores, key, values, fewer
        self._part = self._choose_part()
        self._part.mkdir(exist_ok=True)
        self.rows_done = self._read_progress()
        self._check_room()
        for column in scores.columns:
            with open(scores.find_file(self._part, column), "ab") as stream:
                nbytes = scores.num_values * count_bytes([column])
                stream.truncate(nbytes)
                _reserve(stream.fileno(), nbytes)
        self.values = [scores.map(self._part, column, "r+") for column in scores.columns]
        self._committed = time.monotonic()

    def _choose_part(self) -> Path:
        """Return the folder to write into. Of small scores it is this host's, since on some file systems no other host
        sees its locks, and this process's alone if another run of the host is at the same ones."""
        folder = self._scores.folder
        name = f"{folder.name}.{socket.gethostname()}" if self._scores.is_small else folder.name
        part = folder.with_name(f"{name}.part")
        try:
            self._lock = lock_file(folder.with_name(f"{name}.lock"))  # which is released however a process ends
        except BlockingIOError:
            error = UserError(
                f"{self._key}: another run is writing {self._values} into {part}; start this one again "
                "when it has, and it finds them"
            )
        else:
            # Only under the lock: the run that had it until now moves the folder to its name, and may already read it.
            if not self._scores.is_whole():
                return part
            self._lock.release()
            error = UserError(
                f"{self._key}: another run has just written {self._values} into {folder}; start this one "
                "again, and it finds them"
            )
        if not self._scores.is_small:
            raise error
        for left in folder.parent.glob(f"{glob.escape(name)}.*.tmp"):
            number = left.name.split(".")[-3]
            if number.isdecimal() and not psutil.pid_exists(int(number)):  # of a run that was killed
                shutil.rmtree(left, ignore_errors=True)
        return folder.with_name(f"{name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")

    def _read_progress(self) -> int:
        """Return the number of rows that are done; 0 if that is not known, or if a file is not as long as it was."""
        try:
            rows = int(json.loads((self._part / PROGRESS).read_text())["rows"])
            sizes = [self._scores.find_file(self._part, column).stat().st_size for column in self._scores.columns]
        except (OSError, ValueError, KeyError, TypeError):
            return 0
        expected = [self._scores.num_values * count_bytes([column]) for column in self._scores.columns]
        return rows if sizes == expected else 0

    def _check_room(self) -> None:
        taken = sum(file.stat().st_blocks * 512 for file in self._part.iterdir())
        missing, free = self._scores.num_bytes - taken, shutil.disk_usage(self._part).free
        if missing > free and not self._scores.is_small:
            raise UserError(
                f"{self._key}: {self._values} take {describe_bytes(self._scores.num_bytes)}, but "
                f"{self._part} has {describe_bytes(free)} free; {self._fewer}make room, or choose another "
                "folder with data.cache_dir",
                Ending.DISK,
            )

    def write(self, numbers: np.ndarray, values: Sequence[np.ndarray]) -> None:
        """Write values, [n, ...] of each column, by their numbers."""
        for column, written in zip(self.values, values, strict=True):
            column[numbers] = written

    def advance(self, rows: int) -> None:
        """Note that so many more rows are done. Once a minute what is done is made to outlive this process."""
        self.rows_done += rows
        if time.monotonic() - self._committed >= _SECONDS_BETWEEN_COMMITS:
            self._flush()
            write_atomically(self._part / PROGRESS, json.dumps({"rows": self.rows_done}))
            self._committed = time.monotonic()

    def _flush(self) -> None:
        for column in self.values:
            assert isinstance(column, np.memmap)
            column.flush()

    def finish(self, notes: Mapping[str, Any]) -> None:
        """Make the folder whole, with what is noted of its values; it is on the disk on return."""
        self._flush()
        (self._part / PROGRESS).unlink(missing_ok=True)
        write_atomically(self._part / DESCRIPTION, json.dumps({"made_from": self._scores.made_from, **notes}))
        write_hashes(self._part)
        if not self._scores.is_whole():
            discard_folder(self._scores.folder)  # what is there is damaged
        publish_folder(self._part, self._scores.folder)
        if self._lock is not None:
            self._lock.release()


def write_scores(scores: Scores, key: str, values: Sequence[np.ndarray]) -> None:
    """Write all values of the columns, in their order, as a `ScoresWriter` does."""
    writer = ScoresWriter(scores, key)
    writer.write(np.arange(scores.num_values), values)
    writer.finish({})
