"""Writing on the ranks that have something to write, while the others wait for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from errors import UserError
from training.distributed.ranks import raise_together

T = TypeVar("T")


def write_together(write: Callable[[], T], what: str, where: Path) -> T:
    """Return what `write` returns. All ranks call it, and it ends all of them where one could not write: a rank that
    ended alone would leave the others in their next collective.

    what: begins the message. where: named by it if the error names no file. Raises UserError.
    """
    written: list[T] = []
    error = None
    try:
        written.append(write())
    except UserError as mistake:
        error = mistake
    except OSError as mistake:
        error = UserError(
            f"{what}: {mistake.filename or where} cannot be written: {mistake.strerror or mistake}; make room, or "
            "choose another folder with data.cache_dir"
        )
    raise_together(error)
    return written[0]
