"""Whole or absent: each file of a checkpoint with its size and hash.

The hash (XXH3, 128 bits: faster than the memory it reads, and no defence against forgery) is computed while the bytes
go to the file and compared while they are read back. A checkpoint without `manifest.json` has not been written to its
end, or comes from elsewhere.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from filesystem import sync_to_disk

MANIFEST_NAME = "manifest.json"
_CHUNK = 8 * 2**20  # bytes


@dataclass(frozen=True)
class FileRecord:
    size: int  # bytes
    xxh3_128: str


class HashedFile:
    """A file to write into, front to back; a context. `finish` flushes it to the disk and says what it holds."""

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
        except OSError:  # bytes that a full disk did not take; what has been raised before says so
            pass

    def __str__(self) -> str:
        return str(self._path)

    def write(self, data: Any) -> int:
        """`data`: bytes, or anything that shows its bytes."""
        self._hash.update(data)
        written = self._file.write(data)
        self._size += written
        self._wrote(written)
        return written

    def flush(self) -> None:
        self._file.flush()

    def finish(self) -> FileRecord:
        self._file.flush()
        os.fsync(self._file.fileno())
        return FileRecord(self._size, self._hash.hexdigest())


def write_manifest(folder: Path, records: Mapping[str, FileRecord]) -> None:
    """Names every other file of `folder`. On disk when this returns."""
    content = {"files": {name: asdict(record) for name, record in sorted(records.items())}}
    file = folder / MANIFEST_NAME
    file.write_text(json.dumps(content, indent=1) + "\n")
    sync_to_disk(file)


def read_manifest(folder: Path) -> dict[str, FileRecord] | None:
    """File name -> record; None when there is no manifest or it cannot be read."""
    try:
        content = json.loads((folder / MANIFEST_NAME).read_text())
        records = {name: FileRecord(**record) for name, record in content["files"].items()}
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        return None
    return records if records and all(Path(name).name == name for name in records) else None


def find_wrong_size(folder: Path) -> str | None:
    """What is wrong with `folder` as far as names and sizes tell, in words; None when nothing is. Reads no file but
    the manifest."""
    records = read_manifest(folder)
    if records is None:
        return f"{folder / MANIFEST_NAME} is missing or damaged"
    for name, record in records.items():
        file = folder / name
        found = file.stat().st_size if file.is_file() else None
        if found is None:
            return f"{file} is missing"
        if found != record.size:
            return f"{file} is damaged: {found} bytes, {record.size} were saved"
    return None


def find_wrong_content(folder: Path, names: Iterable[str]) -> str | None:
    """The first of the files `names` whose bytes are not those that were saved, in words; None when all are."""
    records = read_manifest(folder)
    if records is None:
        return f"{folder / MANIFEST_NAME} is missing or damaged"
    for name in names:
        try:
            if _hash_file(folder / name) != records[name].xxh3_128:
                return f"{folder / name} is damaged: its bytes are not those that were saved"
        except OSError as error:
            return f"{folder / name} cannot be read ({error.strerror})"
    return None


def _hash_file(file: Path) -> str:
    digest, buffer = xxhash.xxh3_128(), memoryview(bytearray(_CHUNK))
    with open(file, "rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()
