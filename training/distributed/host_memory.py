"""The memory of this host that this process may use: a container's limit, where one is lower than what the host has.

A limit holds for all processes of a control group, and for the groups below it. The kernel drops the cached content of
files before it ends a process, so that does not count as used. Described in the kernel's
Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

_PROC = Path("/proc/self")
_CACHED = ("inactive_file", "active_file", "total_inactive_file", "total_active_file")  # of version 2, and of 1


class _Limit(NamedTuple):
    limit: int  # bytes
    used: int  # bytes, without what the system can take back


def measure_host_memory() -> int:
    """Return the bytes that the processes of this host, or of this container, may use together."""
    return min([psutil.virtual_memory().total, *(found.limit for found in _list_limits())])


def measure_available_memory() -> int:
    """Return the bytes that they may use beyond what they use already."""
    return min([psutil.virtual_memory().available, *(found.limit - found.used for found in _list_limits())])


def _list_limits() -> Iterator[_Limit]:
    """Yield the limit of each control group that holds this process; none outside of Linux."""
    for folder in _list_groups():
        for limit, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            try:
                num_bytes, used_bytes = int((folder / limit).read_text()), int((folder / used).read_text())
                lines = [line.split() for line in (folder / "memory.stat").read_text().splitlines()]
            except (OSError, ValueError):  # of the other version, or "max": no limit
                continue
            statistics = {name: int(value) for name, value in lines}
            names = _CACHED[2:] if _CACHED[2] in statistics else _CACHED[:2]
            yield _Limit(num_bytes, used_bytes - sum(statistics.get(name, 0) for name in names))


def _list_groups() -> Iterator[Path]:
    """Yield the folders of this process's control group and of those above it, where memory is controlled."""
    try:
        mounts = [line.split() for line in (_PROC / "mountinfo").read_text().splitlines()]
        groups = [line.split(":", 2) for line in (_PROC / "cgroup").read_text().splitlines()]
    except OSError:
        return
    for fields in mounts:
        root, mounted, (kind, _, options) = fields[3], Path(fields[4]), fields[fields.index("-") + 1 :]
        for _, controllers, path in groups:
            is_second = kind == "cgroup2" and not controllers
            if not is_second and not (kind == "cgroup" and "memory" in controllers.split(",") and "memory" in options):
                continue
            # a container sees its own group as the root, or the whole path of which its mount begins in the middle
            below = Path(path.removeprefix(root if root != "/" else "").lstrip("/"))
            for depth in range(len(below.parts) + 1):
                yield mounted.joinpath(*below.parts[:depth])
