"""The next-token distributions of a teacher at the targets of a tokenized folder: written once, next to its tokens.

`KEY/teacher-ID/`, for N targets and their k most probable tokens:

    token_ids             int32 [N, k], the most probable first
    log_probabilities     fp32 [N, k + 1]: of these tokens, and of all others together
    description.json      the numbers above, and the mean probability that the k tokens cover

Targets are numbered row by row. ID is a hash of what they depend on: the teacher by content, the tokens, the rows,
temperature and k. While it is written, the folder is `teacher-ID.part`, with the number of rows that are done, so that
an interrupted pass continues at any layout. It gets its name by a rename, with hashes of its files.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data.storage.disk import describe_bytes
from data.storage.hashes import find_changed, write_hashes
from data.storage.tokenized import column_file, find_scores, load_summary
from errors import UserError
from filesystem import discard_folder, lock_file, sync_to_disk, write_atomically

TOKENS, LOGS = "token_ids", "log_probabilities"
TOKEN_DTYPE, LOG_DTYPE = np.dtype(np.int32), np.dtype(np.float32)
DESCRIPTION, PROGRESS = "description.json", "progress.json"
_SECONDS_BETWEEN_COMMITS = 60.0


def count_bytes(top_k: int) -> int:
    """Return the bytes of a target on disk."""
    return top_k * TOKEN_DTYPE.itemsize + (top_k + 1) * LOG_DTYPE.itemsize


def teacher_path(folder: Path, rows: str, model_id: str, top_k: int, temperature: float) -> Path:
    """Return the folder of a teacher's distributions for a tokenized folder, see `find_scores`. rows: the name of the
    plan by which samples became rows. model_id: a hash of the teacher."""
    state = (model_id, load_summary(folder).fingerprints, rows, top_k, temperature)
    return find_scores(folder, f"teacher-{hashlib.sha256(repr(state).encode()).hexdigest()[:16]}")


@dataclass(frozen=True)
class TeacherSize:
    """The shape of a teacher's distributions."""

    num_targets: int
    top_k: int

    @property
    def num_bytes(self) -> int:
        return self.num_targets * count_bytes(self.top_k)

    def describe(self) -> str:
        return f"{self.top_k} tokens at each of {self.num_targets:,} targets, {describe_bytes(self.num_bytes)} on disk"


def is_whole(folder: Path, size: TeacherSize) -> bool:
    """Return whether the folder holds the distributions as they were written. It reads all bytes."""
    try:
        described = json.loads((folder / DESCRIPTION).read_text())
        return (described["num_targets"], described["top_k"]) == (
            size.num_targets,
            size.top_k,
        ) and find_changed(folder, compares_bytes=True) is None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def read_covered(folder: Path) -> float:
    """Return the mean probability that the k tokens cover."""
    return json.loads((folder / DESCRIPTION).read_text())["covered"]


class TeacherTable:
    """The distributions of a whole folder, memory-mapped."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        top_k = json.loads((folder / DESCRIPTION).read_text())["top_k"]
        self._token_ids = np.asarray(_map(folder, TOKENS, TOKEN_DTYPE, "r")).reshape(-1, top_k)
        self._logs = np.asarray(_map(folder, LOGS, LOG_DTYPE, "r")).reshape(-1, top_k + 1)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._folder,)  # a worker process that is spawned opens it itself

    def read_token_ids(self, numbers: np.ndarray) -> np.ndarray:
        """Return the teacher's tokens at targets, int32 [n, k], by the numbers of the targets."""
        return self._token_ids[numbers]

    def read_log_probabilities(self, numbers: np.ndarray) -> np.ndarray:
        """Return the log-probabilities of these tokens and of all others, fp32 [n, k + 1]."""
        return self._logs[numbers]


def _reserve(descriptor: int, nbytes: int) -> None:
    """Take the room of a file on its disk, where its file system can: a write to mapped memory that finds none ends the
    process with SIGBUS."""
    if hasattr(os, "posix_fallocate"):  # not on macOS
        try:
            os.posix_fallocate(descriptor, 0, nbytes)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise


def _map(folder: Path, name: str, dtype: np.dtype, mode: str) -> np.memmap:
    return np.memmap(column_file(folder, name), dtype, mode=mode)  # type: ignore[call-overload]


class TeacherWriter:
    """Writes the distributions into `folder`, rows in a fixed order. One process of the run has it.

    rows_done: of an earlier pass that was interrupted.
    """

    def __init__(self, folder: Path, size: TeacherSize, key: str) -> None:
        """key: what messages call the data. Raises UserError where the disk has no room, or another run writes it or
        has written it since this one looked; OSError where the disk fails."""
        self._folder, self._size = folder, size
        self._part = folder.with_name(f"{folder.name}.part")
        try:
            self._lock = lock_file(folder.with_name(f"{folder.name}.lock"))  # which is released however a process ends
        except BlockingIOError:
            raise UserError(
                f"{key}: another run is writing the teacher's distributions into {self._part}; start this one again "
                "when it has, and it finds them"
            ) from None
        # Only under the lock: the run that had it until now moves the folder to its name, and may already read it.
        if folder.is_dir() and is_whole(folder, size):
            self._lock.release()
            raise UserError(
                f"{key}: another run has just written the teacher's distributions into {folder}; start this one again, "
                "and it finds them"
            )
        self._part.mkdir(exist_ok=True)
        self.rows_done, self._covered = self._read_progress()
        files = {TOKENS: size.top_k * TOKEN_DTYPE.itemsize, LOGS: (size.top_k + 1) * LOG_DTYPE.itemsize}
        self._check_room(key)
        for name, width in files.items():
            with open(column_file(self._part, name), "ab") as stream:
                stream.truncate(size.num_targets * width)
                _reserve(stream.fileno(), size.num_targets * width)
        self._token_ids = _map(self._part, TOKENS, TOKEN_DTYPE, "r+").reshape(-1, size.top_k)
        self._logs = _map(self._part, LOGS, LOG_DTYPE, "r+").reshape(-1, size.top_k + 1)
        self._committed = time.monotonic()

    def _read_progress(self) -> tuple[int, float]:
        try:
            progress = json.loads((self._part / PROGRESS).read_text())
            return int(progress["rows"]), float(progress["covered"])
        except (OSError, ValueError, KeyError, TypeError):
            return 0, 0.0

    def _check_room(self, key: str) -> None:
        taken = sum(file.stat().st_blocks * 512 for file in self._part.iterdir())
        missing, free = self._size.num_bytes - taken, shutil.disk_usage(self._part).free
        if missing > free:
            raise UserError(
                f"{key}: the teacher's distributions take {describe_bytes(self._size.num_bytes)}, but {self._part} has "
                f"{describe_bytes(free)} free; lower distill.top_k, make room, or choose another folder with "
                "data.cache_dir"
            )

    def write(self, numbers: np.ndarray, token_ids: np.ndarray, log_probabilities: np.ndarray) -> None:
        """Write the distributions of targets, by their numbers."""
        self._token_ids[numbers], self._logs[numbers] = token_ids, log_probabilities
        self._covered += float((1 - np.exp(log_probabilities[:, -1].astype(np.float64))).sum())

    def advance(self, rows: int) -> None:
        """Note that so many more rows are done. Once a minute what is done is made to outlive this process."""
        self.rows_done += rows
        if time.monotonic() - self._committed >= _SECONDS_BETWEEN_COMMITS:
            self.commit()

    def commit(self) -> None:
        """Flush what is done, and note it."""
        self._flush()
        write_atomically(self._part / PROGRESS, json.dumps({"rows": self.rows_done, "covered": self._covered}))
        self._committed = time.monotonic()

    def _flush(self) -> None:
        for table in (self._token_ids, self._logs):
            assert isinstance(table, np.memmap)
            table.flush()

    def finish(self) -> None:
        """Make the folder whole; it is on the disk on return."""
        self._flush()
        (self._part / PROGRESS).unlink(missing_ok=True)
        described = {
            "num_targets": self._size.num_targets,
            "top_k": self._size.top_k,
            "covered": self._covered / self._size.num_targets,
        }
        write_atomically(self._part / DESCRIPTION, json.dumps(described))
        write_hashes(self._part)
        discard_folder(self._folder)  # what is there is damaged
        os.rename(self._part, self._folder)
        sync_to_disk(self._folder.parent)
        self._lock.release()
