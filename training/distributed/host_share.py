"""A rank's share of its host: which of the visible GPUs, and how many threads. Reads nothing but the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from console import pluralize
from errors import UserError

ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")  # the last two: older


def set_allocator_defaults() -> None:
    """Make torch's allocator use expandable segments: batches of varying lengths fragment the GPU's memory less.

    Called before torch is imported; a user's setting is kept. Does not initialize CUDA.
    """
    if not any(name in os.environ for name in ALLOCATOR_SETTINGS):
        os.environ[ALLOCATOR_SETTINGS[0]] = "expandable_segments:True"


def may_share_gpus(visible_devices_variables: Sequence[str]) -> bool:
    """Returns whether a rank may use a GPU whose number is not its own.

    `srun --gpus-per-task=1` and scripts that start ranks one by one let each see its own GPU alone, which is number 0
    for all of them. Ranks that each have an `NCCL_HOSTID` may share a GPU: NCCL allows it then.

    visible_devices_variables: CUDA_VISIBLE_DEVICES or its equivalent for this accelerator. The deepspeed launcher lists
    one GPU for each rank that it starts, whether they exist or not; torchrun lets all its ranks see the same ones.
    """
    lists = [os.environ[name].split(",") for name in visible_devices_variables if os.environ.get(name)]
    sees_its_own = "TORCHELASTIC_RUN_ID" not in os.environ and any(len(listed) == 1 for listed in lists)
    return "NCCL_HOSTID" in os.environ or sees_its_own


def choose_gpu(local_rank: int, local_size: int, device_count: int, may_share: bool = False) -> int:
    """Return the number of this rank's GPU among the `device_count` that it sees.

    may_share: see `may_share_gpus`. Raises UserError, on all ranks of the host, when there are fewer GPUs than ranks.
    """
    if max(local_rank + 1, local_size) <= device_count:
        return local_rank
    if may_share and device_count > 0:
        return local_rank % device_count
    raise UserError(
        f"{pluralize(local_size, 'rank')} started on this host, with "
        f"{pluralize(device_count, 'GPU')} visible; start one rank per GPU "
        f"(deepspeed --num_gpus {device_count}, torchrun --nproc_per_node {device_count}), or train on the CPU with "
        "DS_ACCELERATOR=cpu. A launcher of your own also sets LOCAL_WORLD_SIZE, to the ranks of one host"
    )


def count_threads(num_cores: int, local_size: int, cores_per_task: int | None = None) -> int:
    """Return the number of threads for one of `local_size` ranks on a host, all of which may use the same `num_cores`.

    cores_per_task: the cores that Slurm gives each rank; then each is bound to its own, and nothing is shared.
    """
    return max(1, num_cores // local_size if cores_per_task is None else min(num_cores, cores_per_task))


def read_cores_per_task() -> int | None:
    """Return the value of `srun --cpus-per-task`; None without it, and in a process that srun did not start."""
    if "SLURM_STEP_NUM_TASKS" not in os.environ or "SLURM_CPUS_PER_TASK" not in os.environ:
        return None
    return int(os.environ["SLURM_CPUS_PER_TASK"])


def has_chosen_threads() -> bool:
    """Returns whether the user has set OMP_NUM_THREADS.

    torchrun sets it to 1 for its ranks when it is not set (torch 2.13, distributed/run.py). The only trace of that is
    the environment that torchrun itself was started with, which lacks it.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        return False
    if "TORCHELASTIC_RUN_ID" not in os.environ or os.environ["OMP_NUM_THREADS"] != "1":
        return True
    return "OMP_NUM_THREADS" in _read_environment(os.getppid())


def _read_environment(process_id: int) -> Mapping[str, str]:
    """The environment that a process was started with; empty where it cannot be read."""
    try:
        entries = Path(f"/proc/{process_id}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)
