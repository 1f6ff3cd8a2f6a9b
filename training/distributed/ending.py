"""`ended.json` in a run's folder: why the run has ended before it had finished. Launchers hide the exit codes of ranks.

The rank that ends first writes it, and the others, which end because it has, leave it as it is. A record from before
this process began is that of an earlier start: the main rank deletes it once the folder is the run's, and a rank that
ends sooner replaces it. Ranks begin at the same time and take seconds to import torch, so none of them can take a
record of this start for an earlier one, unless the clocks of two hosts are further apart than that.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from errors import Ending
from masking import mask_text

_ROOM = 2**14  # bytes that are reserved for the file
_LONGEST = 2_000  # characters of its message, of up to 6 bytes each in JSON
_BEGAN = datetime.now(UTC)  # about when this process did: this module is imported before torch
Claim = Callable[[], AbstractContextManager[bool]]
"""Returns a context that yields whether the folder may be written to, and in which it stays so."""


@dataclass(frozen=True)
class _RecordFile:
    """file: where the record belongs. rank: that of this process. reserved: at most one open file without a name, which
    has its room on the disk; none where the file system has no such files, and once it has been used. claim: None where
    the folder is the run's."""

    file: Path
    rank: int
    reserved: list[int]
    claim: Claim | None = None


_place: _RecordFile | None = None
_listeners: list[Callable[[int, str], None]] = []


def notify_of_end(listener: Callable[[int, str], None]) -> None:
    """From now on, have `announce_end` call this with an exit code and a message."""
    _listeners.append(listener)


def announce_end(code: int, message: str) -> None:
    """Tell the listeners why this rank is about to end. code, message: see `record_end`, which does this first."""
    for listener in _listeners:
        listener(code, message.strip())


def record_end_in(file: Path, rank: int, claim: Claim | None = None) -> None:
    """From now on, have `record_end` write to this file. Its room on the disk is taken now: later a full disk may be
    what ends the run. claim: where the folder is not the run's yet, and may be another one's; then nothing is taken."""
    global _place
    for descriptor in [] if _place is None else _place.reserved:  # of an earlier run of this process
        os.close(descriptor)
    _place = _RecordFile(file, rank, _reserve(file.parent) if claim is None else [], claim)


def discard_earlier_end(file: Path) -> None:
    """Delete the record of an earlier start. One that cannot be read, such as an empty file, is taken for one."""
    try:
        time = datetime.fromisoformat(json.loads(file.read_text())["time"])
        is_earlier = time < _BEGAN
    except (OSError, ValueError, KeyError, TypeError):
        is_earlier = True
    if is_earlier:
        file.unlink(missing_ok=True)


def record_end(code: int, message: str) -> None:
    """Write why this rank is about to end, unless another one has. code: its exit code, an `Ending` or 128 + N for
    signal N. message: what it has said. Callable from any thread."""
    announce_end(code, message)
    if _place is None:
        return
    reason = Ending(code).name.lower() if code in set(Ending) else "signal"
    time, text = datetime.now(UTC).isoformat(timespec="seconds"), mask_text(message.strip())[:_LONGEST]
    record = {"reason": reason, "code": int(code), "rank": _place.rank, "message": text, "time": time}
    content = json.dumps(record, indent=2) + "\n"
    with suppress(OSError), _place.claim() if _place.claim is not None else nullcontext(True) as may_write:
        if not may_write:
            return
        discard_earlier_end(_place.file)
        try:
            _name_reserved(_place, content.encode())
        except (OSError, IndexError):
            with open(_place.file, "x") as stream:
                stream.write(content)


def _reserve(folder: Path) -> list[int]:
    """Open a file without a name on the disk of a folder, and take its room; none where that is not possible."""
    try:
        descriptor = os.open(folder, os.O_TMPFILE | os.O_WRONLY, 0o666)
        os.posix_fallocate(descriptor, 0, _ROOM)
    except (OSError, AttributeError):  # the latter on macOS
        return []
    return [descriptor]


def _name_reserved(target: _RecordFile, content: bytes) -> None:
    """Write the reserved file and give it its name, whole. Raises OSError where another file has that name, IndexError
    where no file is reserved."""
    descriptor = target.reserved.pop()  # another thread may record an end too
    os.pwrite(descriptor, content, 0)
    os.truncate(descriptor, len(content))
    # An absolute path uses no folder's number, but without one Python (3.11) does not follow the link
    os.link(f"/proc/self/fd/{descriptor}", target.file, src_dir_fd=descriptor)
