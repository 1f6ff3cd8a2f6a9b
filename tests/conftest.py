"""Fixtures: groups of worker processes, and tiny models and tokenizers with random weights."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from support.environment import clean_this_process  # noqa: E402

clean_this_process()  # before torch and huggingface_hub are imported, which read theirs once

import torch  # noqa: E402
from support.workers import WorkerGroup  # noqa: E402

torch.set_num_threads(1)  # the processes that share the test files, and their ranks, would spin for each other's cores


@pytest.fixture(scope="session")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], WorkerGroup]]:
    """workers(n): the group of n processes, started on first use and shared by the whole session."""
    groups: dict[int, WorkerGroup] = {}
    log_dir = tmp_path_factory.mktemp("workers")

    def group(world_size: int) -> WorkerGroup:
        return groups.setdefault(world_size, WorkerGroup(world_size, log_dir))

    yield group
    for started in groups.values():
        started.close()
