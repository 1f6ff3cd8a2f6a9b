"""This host measured as a machine of `conf/hardware`: memory, matrix products and copies, shared by its ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch

from training.config.precision import DTYPES
from training.config.schema import Precision
from training.distributed.host_memory import measure_host_memory

_GIB, _GB = 2**30, 10**9
_MATRIX, _ROUNDS = 1024, 5


def measure_host(precision: Precision, world_size: int) -> dict[str, Any]:
    """Return every field of `HardwareConfig` that can be null, in its unit, as `world_size` ranks share this host."""
    cores = len(os.sched_getaffinity(0))
    memory = measure_host_memory() / _GIB
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, cores // world_size))
    share = min(1.0, cores / world_size)  # more ranks than cores share them
    try:
        flops, copied = measure_matmul(DTYPES[precision]) * share, measure_copy() * share
    finally:
        torch.set_num_threads(threads)
    return {
        "cards_per_node": world_size, "memory": memory / world_size, "peak_flops": {precision.value: flops},
        "memory_bandwidth": copied / _GB, "intra_node_bandwidth": copied / _GB, "inter_node_bandwidth": copied / _GB,
        "host_memory": memory, "host_memory_bandwidth": copied / _GB * world_size, "host_link_bandwidth": copied / _GB,
    }  # fmt: skip


def measure_matmul(dtype: torch.dtype) -> float:
    """Return the FLOP/s of a square matrix product with torch's present number of threads: the best of a few."""
    left, right = (torch.randn(_MATRIX, _MATRIX).to(dtype) for _ in range(2))
    return 2 * _MATRIX**3 / _best_seconds(lambda: left @ right)


def measure_copy() -> float:
    """Return the bytes per second that a copy reads and writes, together."""
    source = torch.zeros(8 * 2**20)  # 32 MiB, more than the caches of a core
    target = torch.empty_like(source)
    return 2 * source.nbytes / _best_seconds(lambda: target.copy_(source))


def _best_seconds(work: Callable[[], object]) -> float:
    work()
    seconds = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
