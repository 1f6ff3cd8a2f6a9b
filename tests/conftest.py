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

from support.environment import clean_this_process, leave_flushing_to_the_system  # noqa: E402

clean_this_process()  # before torch and huggingface_hub are imported, which read theirs once

from support.configs import prepare_hydra_once  # noqa: E402
from support.workers import WorkerGroup, freeze_what_stays  # noqa: E402

prepare_hydra_once()
leave_flushing_to_the_system()

# The same examples in every run, so that a change alone makes a test fail; the seconds that one takes are the machine's
settings.register_profile("project", deadline=None, derandomize=True, database=None)
settings.load_profile("project")

# Files that take minutes in the long suite, then those that take half a minute in the short one: the longest first, so
# that the processes that share the files end together
_LONGEST = (
    "test_launcher_faults", "test_combinations", "test_resume_sharded", "test_docs", "test_resume_layouts",
    "test_tensor_parallel", "test_list_models", "test_launcher_signals", "test_expert_parallel", "test_two_hosts",
    "test_lora", "test_zero_stages", "test_context_parallel", "test_launcher", "test_hybrid_parity",
    "test_wrapped_training", "test_routers", "test_schedules", "test_sequence_parallel", "test_plan_against_engine",
    "test_family_parity", "test_reward", "test_watchdog", "test_dpo", "test_kto", "test_generic_parity",
    "test_parity", "test_gpu_report", "test_embedding", "test_elastic", "test_first_day",
    "test_search", "test_plan_run", "test_run", "test_interrupts", "test_configs", "test_sweep", "test_fp16",
    "test_supervise", "test_simulated_nccl", "test_bad_input", "test_gradient_sums", "test_families",
    "test_compilation", "test_streaming", "test_kept_in_fp32", "test_conversion",
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


@pytest.fixture(scope="module", autouse=True)
def little_to_look_through() -> Iterator[None]:
    """Objects that a file's tests leave, such as the syntax trees of all sources, would cost each garbage collection of
    those after them half a second."""
    yield
    freeze_what_stays()


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
