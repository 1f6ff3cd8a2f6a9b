"""Atomic writes and renames, flushing to disk, and locks between processes.

A rename is atomic and a flush is not, so whatever must not be seen in part is written under a temporary name, flushed,
and renamed.
"""

from __future__ import annotations

import ctypes
import errno
import filecmp
import glob
import json
import logging
import math
import os
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import xxhash
from filelock import BaseFileLock, FileLock, Timeout

from console import report_progress
from errors import UserError

_CHUNK = 8 * 2**20  # bytes that are hashed at a time
_END = 2**20  # bytes
_ABANDONED = 86_400  # seconds without a change, after which a temporary folder of another host is deleted
_BLOCK = 2**16  # bytes
_CANNOT_SYNC = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)
_warned: set[int] = set()  # file systems that cannot sync folders
AT_FDCWD, RENAME_EXCHANGE = -100, 2  # of renameat2(2)


def sync_to_disk(path: Path) -> None:
    """Waits until a file's bytes, or a folder's own entries (names), are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        wait_for_disk(descriptor, path)
    finally:
        os.close(descriptor)


def wait_for_disk(descriptor: int, path: Path) -> None:
    """Waits until an open file or folder is on disk. All waiting for disks is done here, so that the watchdog can
    distinguish a slow disk from a rank that is stuck. Some file systems cannot sync folders: that is reported once."""
    try:
        _fsync(descriptor, path, os.fstat(descriptor).st_size)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC or not path.is_dir():
            raise
        _warn_of_folders(os.fstat(descriptor).st_dev, path)


def _fsync(descriptor: int, path: Path, num_bytes: int) -> None:
    """path, num_bytes: for `find_flushed`."""
    os.fsync(descriptor)


def find_flushed(frames: Iterable[FrameType]) -> tuple[Path, int] | None:
    """Returns what one of the threads with these stacks waits for a disk to take, and its bytes; None where none
    does."""
    for innermost in frames:
        frame: FrameType | None = innermost
        while frame is not None:
            if frame.f_code is _fsync.__code__:
                return frame.f_locals["path"], frame.f_locals["num_bytes"]
            frame = frame.f_back
    return None


def _warn_of_folders(device: int, path: Path) -> None:
    """device: the file system, of which one folder is named."""
    if device not in _warned:
        _warned.add(device)
        logging.getLogger(__name__).warning(
            "%s is on a file system that cannot sync folders: what is saved is safe from the end of a process, but "
            "perhaps not from that of its host", path,
        )  # fmt: skip


def write_atomically(file: Path, content: str | Callable[[Any], object], writer: str = "") -> None:
    """Writes a file so that a reader sees the old content or the new, never a part; it is on disk when this returns.

    content: the text, or a function that writes bytes into the open file that it is given. writer: distinguishes
    processes that write the same file at the same time; each has its own temporary file.
    """
    temporary = file.with_name(f".{file.name}.tmp{writer}")
    with open(temporary, "wb") as stream:
        if callable(content):
            content(stream)
        else:
            stream.write(content.encode())
        stream.flush()
        wait_for_disk(stream.fileno(), temporary)
    os.replace(temporary, file)
    sync_to_disk(file.parent)


def make_temporary(folder: Path) -> Path:
    """Makes an empty folder next to `folder`, in which this host prepares it, to be published. What killed processes
    left is deleted: of this host, and of others, such as containers that were replaced, after a day without a change.

    The name has the host in it: on some shared file systems locks are known to one host alone (Lustre's localflock,
    NFS's local_lock).
    """
    temporary = folder.with_name(f"{folder.name}.{socket.gethostname()}.tmp")
    for left in folder.parent.glob(f"{glob.escape(folder.name)}.*.tmp"):
        if left == temporary or _find_last_change(left) < time.time() - _ABANDONED:
            shutil.rmtree(left, ignore_errors=True)
    temporary.mkdir()
    return temporary


def _find_last_change(folder: Path) -> float:
    try:
        return max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
    except OSError:  # it was deleted or published meanwhile
        return math.inf


def discard_folder(folder: Path) -> None:
    """Deletes a folder, if it exists. Its name is free on return, even if files of it stay, such as those that are in
    use on NFS: else `publish_folder` would take it for one that another host has made. Raises OSError where the name
    cannot be freed."""
    doomed = folder.with_name(f"{folder.name}.{secrets.token_hex(4)}.tmp")
    with suppress(FileNotFoundError):
        os.rename(folder, doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def publish_folder(temporary: Path, folder: Path) -> None:
    """Gives a complete folder its name, in one rename. Where a process of another host has been first, its folder
    stays, and `temporary` is deleted: both hold the same."""
    try:
        os.rename(temporary, folder)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        shutil.rmtree(temporary)
    sync_to_disk(folder.parent)


def write_page(file: Path, template: Path, content: object) -> None:
    """Writes an HTML page that holds its data. template: it has the word DATA, in a script element of the type
    application/json, where `content` belongs. A number that is not finite, which no browser reads, becomes null."""
    # In a script element only this character could end the JSON early.
    data = json.dumps(_drop_infinite(content), allow_nan=False).replace("<", "\\u003c")
    write_atomically(file, template.read_text().replace("DATA", data, 1))


def _drop_infinite(content: object) -> object:
    """Returns content for JSON with None in place of each number that is not finite."""
    if isinstance(content, Mapping):
        return {name: _drop_infinite(part) for name, part in content.items()}
    if isinstance(content, list | tuple):
        return [_drop_infinite(part) for part in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def copy_with_progress(file: str | Path, target: str | Path) -> None:
    """Copies a file as `shutil.copy2` does, of any size: it reports progress, by which a watchdog knows that a rank is
    not stuck. Raises OSError."""
    with open(file, "rb") as source, open(target, "wb") as copy:
        while block := source.read(_CHUNK):
            copy.write(block)
            report_progress()
    shutil.copystat(file, target)


def check_new_file(file: Path, option: str, replaces: bool = False) -> None:
    """Raises UserError where a file cannot be written: option names the place, and replaces allows one that is
    there."""
    if file.is_dir():
        raise UserError(f"{option} {file} is a folder; give a file in it")
    if not file.absolute().parent.is_dir():
        raise UserError(f"{option} {file}: there is no folder {file.absolute().parent}; make it first")
    if file.exists() and not replaces:
        raise UserError(f"{option} {file} is there already; give another one, or move it")


def publish_changed(staged: Path, folder: Path) -> None:
    """Moves the files below `staged` that differ from those of `folder`, or are new there, into it, each one atomically
    and on the disk before it gets its name. Both are on one file system; what `folder` holds beyond them stays."""
    for new in sorted(path for path in staged.rglob("*") if path.is_file()):
        file = folder / new.relative_to(staged)
        if file.is_file() and filecmp.cmp(new, file, shallow=False):
            continue
        file.parent.mkdir(parents=True, exist_ok=True)
        sync_to_disk(new)
        os.replace(new, file)
        sync_to_disk(file.parent)


def hash_file(file: Path) -> str:
    """Returns the XXH3 hash of a file, 128 bits in hex. It is faster than memory, and no protection against forgery.
    Raises OSError."""
    digest, buffer = xxhash.xxh3_128(), memoryview(bytearray(_CHUNK))
    with open(file, "rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            digest.update(buffer[:count])
            report_progress()
    return digest.hexdigest()


def hash_ends(file: Path, num_bytes: int = _END) -> str:
    """Returns the hash of a file's first and last `num_bytes` (1 MiB), in hex: of all of a file of twice as many, or
    fewer. Raises OSError."""
    digest = xxhash.xxh3_128()
    with open(file, "rb", buffering=0) as stream:
        digest.update(stream.read(num_bytes))
        stream.seek(max(os.fstat(stream.fileno()).st_size - num_bytes, 0))
        digest.update(stream.read(num_bytes))
    return digest.hexdigest()


def hash_sample(file: Path) -> str:
    """Returns the hash of 32 blocks of 64 KiB, evenly spaced from a file's first to its last byte, in hex: of all of it
    up to 2 MiB. Raises OSError."""
    digest, blocks = xxhash.xxh3_128(), 32
    with open(file, "rb", buffering=0) as stream:
        last = max(os.fstat(stream.fileno()).st_size - _BLOCK, 0)
        for number in range(blocks):
            stream.seek(last * number // (blocks - 1))
            digest.update(stream.read(_BLOCK))
    return digest.hexdigest()


def exchange(new: Path, old: Path) -> None:
    """Swaps two folders atomically. On a file system that cannot do so (NFS) the old one is first moved to a name that
    nothing removes."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 and renameat2(AT_FDCWD, os.fsencode(new), AT_FDCWD, os.fsencode(old), RENAME_EXCHANGE) == 0:
        return
    aside = old.with_name(f"{old.name}.old-{secrets.token_hex(4)}")
    os.rename(old, aside)
    os.rename(new, old)
    os.rename(aside, new)


def lock_file(file: Path, on_wait: Callable[[], None] | None = None) -> BaseFileLock:
    """Holds the kernel's lock on `file` until it is released or this process ends, however it ends. The empty file
    stays.

    on_wait: called once when another process holds the lock, which is then waited for. Without it, raises
    BlockingIOError. Raises OSError where the file system has no locks.
    """
    lock = FileLock(file, fallback_to_soft=False)  # a soft lock outlives a process that is killed
    try:
        lock.acquire(timeout=0)
    except NotImplementedError as error:
        raise OSError(errno.ENOSYS, str(error), str(file)) from None
    except Timeout:
        if on_wait is None:
            raise BlockingIOError(f"{file} is locked by another process") from None
        on_wait()
        lock.acquire()
    return lock
