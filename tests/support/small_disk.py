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
    with try_small_disk(folder, nbytes) as fault:
        if fault:
            pytest.skip(f"no tmpfs can be mounted here ({fault}); run it as root, or under `unshare -rm`")
        yield folder


@contextmanager
def try_small_disk(folder: Path, nbytes: int) -> Iterator[str]:
    """Makes `folder` such a disk. Yields why it is an ordinary folder instead; empty where it is a disk."""
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", str(folder)], capture_output=True, text=True
    )
    try:
        yield mounted.stderr.strip() or f"code {mounted.returncode}" if mounted.returncode else ""
    finally:
        if mounted.returncode == 0:
            subprocess.run(["umount", "-l", str(folder)], check=True)
