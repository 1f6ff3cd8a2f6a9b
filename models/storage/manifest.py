"""The manifest: each file of a checkpoint with its size and hash, so that a checkpoint is either complete or not one.

The hash (XXH3, 128 bits: faster than memory, and no protection against forgery) is computed while the bytes are written
and compared when they are read back. Training writes a manifest with every checkpoint, and the converter with its one
step; the file of passthrough tensors next to them has one of its own. A training checkpoint without `manifest.json` was
not written completely, or comes from elsewhere. A converted folder may be from before it had one: it is `global_step0`,
and holds no state of a trainer (`is_converted`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from filesystem import hash_file, sync_to_disk, wait_for_disk

MANIFEST_NAME = "manifest.json"
STATE_NAME = "trainer_state.json"  # of a training checkpoint; see training/checkpoint/state.py
CONVERTED_NAME = "global_step0"  # the step of a converted folder


@dataclass(frozen=True)
class FileRecord:
    """A file's entry in the manifest."""

    size: int  # bytes
    xxh3_128: str


class HashedFile:
    """A file that is written front to back and hashed on the way; a context. Gives its record when all is written;
    `finish` syncs it before."""

    def __init__(self, path: Path, wrote: Callable[[int], None] = lambda count: None) -> None:
        """wrote: called with the number of bytes."""
        self._path, self._wrote = path, wrote
        self._file = open(path, "wb")
        self._hash = xxhash.xxh3_128()
        self._size = 0

    def __enter__(self) -> HashedFile:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._file.close()
        except OSError:  # bytes that a full disk did not take; an earlier exception reports it
            pass

    def __str__(self) -> str:
        return str(self._path)

    def write(self, data: Any) -> int:
        """Write `data`, bytes or an object with the buffer protocol. Returns the number of bytes."""
        self._hash.update(data)
        written = self._file.write(data)
        self._size += written
        self._wrote(written)
        return written

    def flush(self) -> None:
        self._file.flush()

    @property
    def record(self) -> FileRecord:
        """The size and the hash of what has been written."""
        return FileRecord(self._size, self._hash.hexdigest())

    def finish(self) -> FileRecord:
        """Sync the file to the disk. Returns its size and hash."""
        self._file.flush()
        wait_for_disk(self._file.fileno(), self._path)
        return self.record


def write_manifest(folder: Path, records: Mapping[str, FileRecord]) -> None:
    """Write the manifest of `folder`: a record of each file that it vouches for. It is on the disk on return."""
    content = {"files": {name: asdict(record) for name, record in sorted(records.items())}}
    file = folder / MANIFEST_NAME
    file.write_text(json.dumps(content, indent=1) + "\n")
    sync_to_disk(file)


def read_manifest(folder: Path) -> dict[str, FileRecord] | None:
    """Return file name -> record; None when there is no manifest or it cannot be read."""
    try:
        content = json.loads((folder / MANIFEST_NAME).read_text())
        records = {name: FileRecord(**record) for name, record in content["files"].items()}
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        return None
    return records if records and all(Path(name).name == name for name in records) else None


def has_manifest(step_dir: Path) -> bool:
    """Return whether the checkpoint has a manifest, damaged or not."""
    return (step_dir / MANIFEST_NAME).exists()


def is_trained(step_dir: Path) -> bool:
    """Return whether the checkpoint was written by training, by the file of its state or the record of that file."""
    return (step_dir / STATE_NAME).exists() or STATE_NAME in (read_manifest(step_dir) or {})


def is_converted(step_dir: Path) -> bool:
    """Return whether the checkpoint needs no manifest, as it was not written by training."""
    return step_dir.name == CONVERTED_NAME and not is_trained(step_dir)


def describe_missing(step_dir: Path) -> str:
    """Return, in words, that a checkpoint has no manifest and should have one."""
    return (
        f"{step_dir} has no {MANIFEST_NAME}: it is not complete, or not from this project (trust_checkpoint=true "
        "accepts it as it is; the other commands: --trust_checkpoint)"
    )


def find_wrong_size(folder: Path, names: Iterable[str] | None = None) -> str | None:
    """Return, in words, the first file of `folder` that is missing or has a wrong size; None when there is none. Reads
    no file but the manifest.

    names: of the files to look at; None for all.
    """
    records = read_manifest(folder)
    if records is None:
        return f"{folder / MANIFEST_NAME} is missing or damaged"
    for name in records if names is None else names:
        file, record = folder / name, records.get(name)
        if record is None:
            return _describe_unlisted(file)
        found = file.stat().st_size if file.is_file() else None
        if found is None:
            return f"{file} is missing"
        if found != record.size:
            return f"{file} is damaged: {found} bytes, {record.size} were saved"
    return None


def find_wrong_content(folder: Path, names: Iterable[str]) -> str | None:
    """Return, in words, the first of the files `names` whose bytes differ from those that were saved; None when there
    is none."""
    records = read_manifest(folder)
    if records is None:
        return f"{folder / MANIFEST_NAME} is missing or damaged"
    for name in names:
        if name not in records:
            return _describe_unlisted(folder / name)
        try:
            if hash_file(folder / name) != records[name].xxh3_128:
                return f"{folder / name} is damaged: its bytes are not those that were saved"
        except OSError as error:
            return f"{folder / name} cannot be read ({error.strerror})"
    return None


def _describe_unlisted(file: Path) -> str:
    return f"{file} is not in the {MANIFEST_NAME} next to it"
