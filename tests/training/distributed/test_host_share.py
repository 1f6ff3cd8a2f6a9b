"""A rank's share of its host: a GPU, threads and cores, and the settings of the allocator."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from errors import UserError
from training.distributed import process
from training.distributed.host_share import (
    choose_gpu,
    count_threads,
    has_chosen_threads,
    may_share_gpus,
    read_cores_per_task,
    set_allocator_defaults,
)
from training.distributed.ranks import Ranks

ROOT = Path(__file__).resolve().parents[3]
OWN, OTHERS = ("CUDA_VISIBLE_DEVICES",), ("ROCR_VISIBLE_DEVICES",)


@pytest.fixture(autouse=True)
def environ(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An environment of its own, empty but for the path."""
    empty = {"PATH": os.environ["PATH"]}
    monkeypatch.setattr(os, "environ", empty)
    return empty


@pytest.mark.parametrize(
    ("local_rank", "local_size", "device_count", "may_share", "gpu"),
    [
        (0, 1, 1, False, 0),
        (0, 1, 8, False, 0),
        (3, 4, 8, False, 3),
        (7, 8, 8, True, 7),
        (3, 4, 1, True, 0),  # each sees its own
        (3, 4, 2, True, 1),  # several on a GPU
    ],
)
def test_each_rank_takes_a_gpu(local_rank: int, local_size: int, device_count: int, may_share: bool, gpu: int) -> None:
    assert choose_gpu(local_rank, local_size, device_count, may_share) == gpu


@pytest.mark.parametrize(
    ("local_rank", "local_size", "device_count", "may_share"),
    [(3, 4, 2, False), (0, 4, 2, False), (1, 2, 1, False), (0, 2, 0, True), (2, 1, 2, False)],
)
def test_fewer_gpus_than_ranks_is_one_line_on_each_of_them(
    local_rank: int, local_size: int, device_count: int, may_share: bool
) -> None:
    expected = rf"{local_size} ranks? started on this host, with {device_count} GPUs? visible; .*DS_ACCELERATOR=cpu"
    with pytest.raises(UserError, match=expected):
        choose_gpu(local_rank, local_size, device_count, may_share)


@pytest.mark.parametrize(
    ("variables", "shares"),
    [
        ({}, False),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, False),  # set by the deepspeed launcher
        ({"CUDA_VISIBLE_DEVICES": ""}, False),
        ({"CUDA_VISIBLE_DEVICES": "3"}, True),  # set by srun --gpus-per-task=1
        ({"CUDA_VISIBLE_DEVICES": "0", "TORCHELASTIC_RUN_ID": "none"}, False),  # seen by all ranks of a torchrun
        ({"NCCL_HOSTID": "rank-1"}, True),
    ],
)
def test_a_gpu_is_shared_by_those_who_can(variables: dict[str, str], shares: bool, environ: dict[str, str]) -> None:
    environ |= variables
    assert may_share_gpus(OWN) == shares
    assert may_share_gpus(OTHERS) == ("NCCL_HOSTID" in variables)


class Accelerator:
    """A stand-in for the accelerator of a machine with GPUs."""

    def __init__(self, device_count: int) -> None:
        self._device_count, self.taken = device_count, list[int]()

    def device_name(self) -> str:
        return "cuda"

    def device_count(self) -> int:
        return self._device_count

    def visible_devices_envs(self) -> list[str]:
        return list(OWN)

    def set_device(self, index: int) -> None:
        self.taken.append(index)


class Host:
    """A host's cores, and those that a rank starting there takes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_cores: int, accelerator: Any = None) -> None:
        self.threads: int | None = None
        self.pinned: list[int] | None = None
        self._accelerator = accelerator
        monkeypatch.setattr(os, "sched_getaffinity", lambda process_id: set(range(num_cores)))
        monkeypatch.setattr(os, "sched_setaffinity", lambda process_id, cores: setattr(self, "pinned", cores))
        monkeypatch.setattr(torch, "set_num_threads", lambda threads: setattr(self, "threads", threads))
        if accelerator is not None:
            monkeypatch.setattr(process, "get_accelerator", lambda: accelerator)


def test_a_rank_takes_its_gpu_and_threads_and_is_not_pinned(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]
) -> None:
    environ["LOCAL_RANK"] = "3"
    host = Host(monkeypatch, num_cores=34, accelerator=(accelerator := Accelerator(8)))
    process.take_device(Ranks(11, 16, 3, 8))
    assert accelerator.taken == [3] and environ["LOCAL_RANK"] == "3"
    assert (host.threads, host.pinned) == (4, None)


def test_products_are_summed_in_fp32(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]) -> None:
    matmul = torch.backends.cuda.matmul
    matmul.allow_bf16_reduced_precision_reduction = matmul.allow_fp16_reduced_precision_reduction = True  # torch's own
    Host(monkeypatch, num_cores=8)
    process.take_device(Ranks(0, 1, 0, 1))
    assert not matmul.allow_bf16_reduced_precision_reduction
    assert not matmul.allow_fp16_reduced_precision_reduction


def test_libraries_take_the_one_gpu_that_a_task_sees(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]) -> None:
    environ |= {"LOCAL_RANK": "3", "CUDA_VISIBLE_DEVICES": "3"}
    Host(monkeypatch, num_cores=8, accelerator=(accelerator := Accelerator(1)))
    process.take_device(Ranks(3, 4, 3, 4))
    assert accelerator.taken == [0] and environ["LOCAL_RANK"] == "0"  # which DeepSpeed's engine takes


def test_too_few_gpus_are_found_before_any_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "get_accelerator", lambda: accelerator)
    accelerator = Accelerator(1)
    for rank in range(2):
        with pytest.raises(UserError, match="2 ranks .* 1 GPU visible"):
            process.find_device(Ranks(rank, 2, rank, 2))
    assert accelerator.taken == []


@pytest.mark.parametrize(
    ("rank", "accelerator", "hints"), [(0, Accelerator(2), 1), (1, Accelerator(2), 0), (0, None, 0)]
)
def test_gpus_that_never_answer_are_hinted_at(
    rank: int, accelerator: Accelerator | None, hints: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    hinted: list[str] = []
    if accelerator is not None:
        monkeypatch.setattr(process, "get_accelerator", lambda: accelerator)
    monkeypatch.setattr(process.dist, "get_rank", lambda: rank)
    monkeypatch.setattr(process, "choose_init_method", lambda: None)
    monkeypatch.setattr(process, "choose_interface", lambda: None)
    monkeypatch.setattr(process.deepspeed, "init_distributed", lambda **_: None)
    monkeypatch.setattr(process.console, "say", hinted.append)
    monkeypatch.setattr(process, "_SECONDS_OF_SILENCE", 0.01)
    monkeypatch.setattr(process.dist, "barrier", lambda: time.sleep(0.1))  # and then they do
    process.join_process_group()
    monkeypatch.setattr(process, "_SECONDS_OF_SILENCE", 60)
    process.join_process_group()
    assert len(hinted) == hints and all("NCCL_P2P_DISABLE=1" in text for text in hinted)


@pytest.mark.parametrize(("given", "expected"), [(None, "1"), ("0", "0")])
def test_nccl_keeps_the_order_of_launches(given: str | None, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, seen = "NCCL_LAUNCH_ORDER_IMPLICIT", []
    monkeypatch.setenv(name, given or "")  # restored after the test
    if given is None:
        monkeypatch.delenv(name)
    for each in ("choose_init_method", "choose_interface"):
        monkeypatch.setattr(process, each, lambda: None)
    monkeypatch.setattr(process.deepspeed, "init_distributed", lambda **_: seen.append(os.environ[name]))
    monkeypatch.setattr(process.dist, "barrier", lambda: None)
    process.join_process_group()
    assert seen == [expected]


def test_a_rank_on_the_cpu_is_pinned_to_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch, num_cores=5)
    process.take_device(Ranks(1, 2, 1, 2))
    assert (host.threads, host.pinned) == (2, [2, 3])


def test_more_ranks_than_cores_have_one_thread_each(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch, num_cores=2)
    process.take_device(Ranks(1, 4, 1, 4))
    assert (host.threads, host.pinned) == (1, None)


@pytest.mark.parametrize("accelerator", [None, Accelerator(8)])
def test_a_users_number_of_threads_is_kept(
    accelerator: Accelerator | None, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]
) -> None:
    environ["OMP_NUM_THREADS"] = "3"
    host = Host(monkeypatch, num_cores=8, accelerator=accelerator)
    process.take_device(Ranks(1, 2, 1, 2))
    assert (host.threads, host.pinned) == (None, None)


def test_slurm_has_shared_out_the_cores_already(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]) -> None:
    environ |= {"SLURM_STEP_NUM_TASKS": "8", "SLURM_CPUS_PER_TASK": "6"}
    host = Host(monkeypatch, num_cores=6)
    process.take_device(Ranks(1, 8, 1, 8))
    assert (host.threads, host.pinned) == (6, None)


def test_threads_are_a_share_of_the_cores_or_what_slurm_gives(environ: dict[str, str]) -> None:
    assert [count_threads(*of) for of in ((64, 8), (7, 2), (1, 8))] == [8, 3, 1]
    assert [count_threads(*of) for of in ((8, 8, 8), (64, 8, 6), (4, 8, 6))] == [8, 6, 4]
    environ["SLURM_CPUS_PER_TASK"] = "6"  # the batch script's
    assert read_cores_per_task() is None


# As torchrun does it: the environment of the launcher is changed while it runs, and its ranks inherit that.
LAUNCHER = """
import os, subprocess, sys
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["TORCHELASTIC_RUN_ID"] = "none"
rank = "from training.distributed.host_share import has_chosen_threads; print(has_chosen_threads())"
sys.exit(subprocess.run([sys.executable, "-c", rank]).returncode)
"""


@pytest.mark.parametrize(("variables", "chosen"), [({}, False), ({"OMP_NUM_THREADS": "1"}, True)])
def test_the_one_thread_of_torchrun_is_nobodys_choice(variables: dict[str, str], chosen: bool) -> None:
    printed = subprocess.check_output(
        [sys.executable, "-c", LAUNCHER], env={**os.environ, **variables}, cwd=ROOT, text=True
    )
    assert printed.strip() == str(chosen)


def test_threads_are_chosen_by_the_variable(environ: dict[str, str]) -> None:
    assert not has_chosen_threads()
    environ["OMP_NUM_THREADS"] = "1"
    assert has_chosen_threads()  # no torchrun
    environ |= {"OMP_NUM_THREADS": "2", "TORCHELASTIC_RUN_ID": "none"}
    assert has_chosen_threads()  # which is not torchrun's


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"])
def test_a_users_settings_of_the_allocator_are_kept(name: str, environ: dict[str, str]) -> None:
    environ[name] = "max_split_size_mb:512"
    before = dict(environ)
    set_allocator_defaults()
    assert environ == before


# The training command up to where it composes its config, and what torch then reads in the environment.
START = """
import os, sys
import trainer_base_ds_mp as trainer
from training.entry import prepare
assert prepare(trainer.SCRIPT, trainer.CONFIG_NAME)
imported_before = "torch" in sys.modules
import torch
print(imported_before, torch.cuda.is_initialized(), torch._C._accelerator_getAllocatorSettings())
"""


def test_the_training_command_lets_segments_grow() -> None:
    printed = subprocess.check_output(
        [sys.executable, "-c", START, "-cn", "llama_tiny_pp2"], env=dict(os.environ), cwd=ROOT, text=True
    )
    assert printed.split() == ["False", "False", "expandable_segments:True"]  # as torch has read it
