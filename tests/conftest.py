"""Fixtures: groups of worker processes, and tiny models and tokenizers with random weights."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

gc.disable()  # until all is imported: none of it is garbage, and to look through it takes a tenth of a worker's time

from support.environment import clean_this_process  # noqa: E402

clean_this_process()  # before torch and huggingface_hub are imported, which read theirs once

from support.workers import WorkerGroup  # noqa: E402

# The same examples in every run, so that a change alone makes a test fail; the seconds that one takes are the machine's
settings.register_profile("project", deadline=None, derandomize=True, database=None)
settings.load_profile("project")

# Files that take half a minute and more, in the long suite first, then in the short one: the longest first, so that the
# processes that share the files end together.
_LONGEST = (
    "test_combinations", "test_tensor_parallel", "test_resume_layouts", "test_resume_sharded", "test_launcher",
    "test_resume_state", "test_run", "test_parity",
    "test_plan_against_engine", "test_dpo", "test_two_hosts", "test_family_parity", "test_lora", "test_families",
    "test_plan_run", "test_device", "test_bad_input", "test_schedules", "test_nonfinite", "test_interrupts",
    "test_docs", "test_configs", "test_packing_parity", "test_order_across_layouts", "test_registry",
    "test_layer_times", "test_conversion", "test_plan_search", "test_convert2ckpt",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {name: number for number, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """The processes that share the test files, and their ranks, would spin for each other's cores."""
    import torch

    torch.set_num_threads(1)


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
