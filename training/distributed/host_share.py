"""What a rank takes of its host: which of the cards that it sees, and how many threads. Reads the environment alone."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from errors import UserError

ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")  # the last two: older


def set_allocator_defaults() -> None:
    """Segments of the card's memory that can grow: batches of varying lengths leave fewer holes that nothing fits into.

    Before torch is imported; what a user has set is kept as it is. It starts no CUDA.
    """
    if not any(name in os.environ for name in ALLOCATOR_SETTINGS):
        os.environ[ALLOCATOR_SETTINGS[0]] = "expandable_segments:True"


def may_share_gpus(visible_devices_variables: Sequence[str]) -> bool:
    """Whether a rank may take a card whose number is not its own: `srun --gpus-per-task=1` and scripts that start ranks
    one by one let each see its own card alone, which is number 0 for all of them; and ranks with an `NCCL_HOSTID` each
    are let through by NCCL, several on one card.

    visible_devices_variables: CUDA_VISIBLE_DEVICES or what it is called for this accelerator. The deepspeed launcher
    lists one for each rank that it starts, whether they are there or not; torchrun lets all its ranks see the same.
    """
    lists = [os.environ[name].split(",") for name in visible_devices_variables if os.environ.get(name)]
    sees_its_own = "TORCHELASTIC_RUN_ID" not in os.environ and any(len(listed) == 1 for listed in lists)
    return "NCCL_HOSTID" in os.environ or sees_its_own


def choose_gpu(local_rank: int, local_size: int, device_count: int, may_share: bool = False) -> int:
    """The number of this rank's card among the `device_count` that it sees.

    may_share: see `may_share_gpus`. Raises UserError, on all ranks of the host, when there are fewer cards than ranks.
    """
    if max(local_rank + 1, local_size) <= device_count:
        return local_rank
    if may_share and device_count > 0:
        return local_rank % device_count
    raise UserError(
        f"{local_size} ranks were started on this host, and {device_count} GPUs are visible; start one rank per GPU "
        f"(deepspeed --num_gpus {device_count}, torchrun --nproc_per_node {device_count}), or train on the CPU with "
        "DS_ACCELERATOR=cpu. A launcher of your own also sets LOCAL_WORLD_SIZE, to the ranks of one host"
    )


def count_threads(num_cores: int, local_size: int, cores_per_task: int | None = None) -> int:
    """Threads of one of `local_size` ranks that share a host, each of which may use the same `num_cores`.

    cores_per_task: what Slurm gives each rank; then it binds each to its own, and there is nothing to share.
    """
    return max(1, num_cores // local_size if cores_per_task is None else min(num_cores, cores_per_task))


def read_cores_per_task() -> int | None:
    """What `srun --cpus-per-task` says; None without it, and in what no srun has started."""
    if "SLURM_STEP_NUM_TASKS" not in os.environ or "SLURM_CPUS_PER_TASK" not in os.environ:
        return None
    return int(os.environ["SLURM_CPUS_PER_TASK"])


def has_chosen_threads() -> bool:
    """Whether someone has set OMP_NUM_THREADS.

    torchrun sets it to 1 for its ranks when nobody has (torch 2.13, distributed/run.py), and leaves no other trace of
    that than its own environment as it was started with, which lacks it.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        return False
    if "TORCHELASTIC_RUN_ID" not in os.environ or os.environ["OMP_NUM_THREADS"] != "1":
        return True
    return "OMP_NUM_THREADS" in _read_environment(os.getppid())


def _read_environment(process_id: int) -> Mapping[str, str]:
    """What a process was started with; nothing where that cannot be read."""
    try:
        entries = Path(f"/proc/{process_id}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)
