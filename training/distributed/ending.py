"""`ended.json` in a run's folder: why the run has ended before it had finished. Launchers hide the exit codes of ranks.

The rank that ends first writes it, and the others, which end because it has, leave it as it is.
"""

from __future__ import annotations

import json
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from errors import Ending
from masking import mask_text

_place: tuple[Path, int] | None = None  # the file, and this process's rank


def record_end_in(file: Path, rank: int) -> None:
    """From now on, have `record_end` write to this file."""
    global _place
    _place = (file, rank)


def record_end(code: int, message: str) -> None:
    """Write why this rank is about to end, unless another one has. code: its exit code, an `Ending` or 128 + N for
    signal N. message: what it has said. Callable from any thread."""
    if _place is None:
        return
    file, rank = _place
    reason = Ending(code).name.lower() if code in set(Ending) else "signal"
    time = datetime.now(UTC).isoformat(timespec="seconds")
    record = {"reason": reason, "code": int(code), "rank": rank, "message": mask_text(message.strip()), "time": time}
    with suppress(OSError), open(file, "x") as stream:
        stream.write(json.dumps(record, indent=2) + "\n")
