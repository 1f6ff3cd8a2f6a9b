"""A real file system of a few megabytes, to run out of."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, nbytes: int) -> Iterator[Path]:
    """`folder`, with a tmpfs of `nbytes` mounted on it. Skips the test where this process may not mount."""
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"no tmpfs can be mounted here ({mounted.stderr.strip()}); run it as root, or under `unshare -rm`")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
