"""Limits of control groups, as files of both versions and in a real group."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from training.distributed import host_memory

ROOT = Path(__file__).resolve().parents[3]
MIB = 2**20


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty /proc/self on a host that has 1,000 MiB, 800 of them free."""
    monkeypatch.setattr(host_memory, "_PROC", tmp_path / "proc")
    memory = SimpleNamespace(total=1000 * MIB, available=800 * MIB)
    monkeypatch.setattr(host_memory.psutil, "virtual_memory", lambda: memory)
    (tmp_path / "proc").mkdir()
    return tmp_path / "proc"


def mount(proc: Path, groups: str, *mounts: str) -> None:
    (proc / "cgroup").write_text(groups)
    (proc / "mountinfo").write_text("".join(f"31 23 0:28 {text}\n" for text in mounts))


def fill(folder: Path, files: dict[str, object]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(f"{content}\n")


def measure() -> tuple[int, int]:
    """In MiB."""
    return host_memory.measure_host_memory() // MIB, host_memory.measure_available_memory() // MIB


def test_without_a_limit_it_is_the_hosts(proc: Path, tmp_path: Path) -> None:
    assert measure() == (1000, 800)  # not Linux
    mount(proc, "0::/a\n", f"/ {tmp_path}/v2 rw - cgroup2 cgroup2 rw")
    fill(tmp_path / "v2" / "a", {"memory.max": "max", "memory.current": 5, "memory.stat": "anon 5"})
    assert measure() == (1000, 800)


def test_the_lowest_limit_of_a_group_and_those_above_it_counts(proc: Path, tmp_path: Path) -> None:
    mount(proc, "0::/pod/train\n", f"/ {tmp_path}/v2 rw - cgroup2 cgroup2 rw")
    cached = f"anon 1\ninactive_file {20 * MIB}\nactive_file {30 * MIB}"
    fill(tmp_path / "v2" / "pod", {"memory.max": 400 * MIB, "memory.current": 150 * MIB, "memory.stat": cached})
    fill(tmp_path / "v2" / "pod" / "train", {"memory.max": "max", "memory.current": 5, "memory.stat": "anon 5"})
    assert measure() == (400, 300)  # what is cached of files can be freed


def test_the_first_version_is_read_where_a_container_sees_its_own_group(proc: Path, tmp_path: Path) -> None:
    groups = "5:cpu,cpuacct:/docker/x\n4:memory:/docker/x\n0::/\n"
    mount(
        proc, groups, f"/docker/x {tmp_path}/cpu rw - cgroup cgroup rw,cpu,cpuacct",
        f"/docker/x {tmp_path}/memory rw shared:3 - cgroup cgroup rw,memory",
    )  # fmt: skip
    usage = {"memory.usage_in_bytes": 200 * MIB, "memory.stat": f"cache 7\ntotal_inactive_file {50 * MIB}"}
    fill(tmp_path / "memory", {"memory.limit_in_bytes": 2**63 - 4096, **usage})
    assert measure() == (1000, 800)
    fill(tmp_path / "memory", {"memory.limit_in_bytes": 300 * MIB, **usage})
    assert measure() == (300, 150)


@pytest.fixture
def limited_group() -> Iterator[Path]:
    """A real group that may use 3 GiB."""
    for parent, name in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        folder = Path(parent) / f"test-{os.getpid()}"
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            (folder / name).write_text(str(3 * 2**30))
            yield folder
            return
        except OSError:
            continue
        finally:
            folder.rmdir()
    pytest.skip("no control group can be made here")


def test_a_real_limit_is_found(limited_group: Path) -> None:
    code = "from training.distributed.host_memory import *; print(measure_host_memory(), measure_available_memory())"
    enter = f'echo $$ > {limited_group}/cgroup.procs && exec "$@"'
    ended = subprocess.run(
        ["sh", "-c", enter, "sh", sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    total, available = map(int, ended.stdout.split())
    assert total == 3 * 2**30 and 2.8 * 2**30 < available < total
