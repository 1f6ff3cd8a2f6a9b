"""The steps of a pipeline checkpoint: its folders `global_stepN`, and the file `latest`, which names one of them."""

from __future__ import annotations

import re
from pathlib import Path

LATEST_NAME = "latest"
TEMPORARY_PREFIX = "tmp-"  # of the name of a folder that is being written or deleted


def is_step(name: str) -> bool:
    """Return whether `name` is that of a step's folder."""
    return re.fullmatch(r"global_step\d+", name) is not None


def step_of(step_dir: Path) -> int:
    """Return N of a `global_stepN` folder."""
    return int(step_dir.name.removeprefix("global_step"))


def list_checkpoints(checkpoints: Path) -> list[Path]:
    """Return the `global_stepN` folders, newest step first, complete or not."""
    return sorted((path for path in checkpoints.glob("global_step*") if is_step(path.name)), key=step_of, reverse=True)


def has_latest(path: Path) -> bool:
    """Return whether `path` holds the file `latest`, damaged or not."""
    return (path / LATEST_NAME).is_file()


def read_latest(path: Path) -> str:
    """Return what the file `latest` in `path` holds."""
    return (path / LATEST_NAME).read_text(errors="replace").strip()


def find_damaged_latest(path: Path) -> str | None:
    """Return, in words, that the file `latest` is there and names no checkpoint, as after a full disk."""
    if not has_latest(path) or is_step(name := read_latest(path)):
        return None
    return f"{path / LATEST_NAME} is damaged: it " + (f"holds {name[:50]!r}" if name else "is empty")
