"""The machines a plan is made for: a row of `conf/hardware/`, or this machine, measured on the spot."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from errors import UserError
from training.config import HardwareConfig, Precision
from training.precision import DTYPES

GIB = 2**30
GB = 10**9
_MATRIX, _ROUNDS = 1024, 5


def complete_hardware(hardware: HardwareConfig, precision: Precision, world_size: int) -> HardwareConfig:
    """`hardware` with every null measured on this machine, its cores and memory shared by `world_size` ranks.

    Raises UserError where no peak is known for the precision.
    """
    if hardware.peak_flops is None:
        hardware = _measure(hardware, precision, world_size)
    if precision.value not in hardware.peak_flops:
        raise UserError(f"precision={precision.value}: hardware={hardware.name} has no peak for it; add it to conf/hardware/{hardware.name}.yaml")
    return hardware


def _measure(hardware: HardwareConfig, precision: Precision, world_size: int) -> HardwareConfig:
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, cores // world_size))
    share = min(1.0, cores / world_size)  # more ranks than cores take turns
    try:
        flops, copied = measure_matmul(DTYPES[precision]) * share, measure_copy() * share
    finally:
        torch.set_num_threads(threads)
    stated = {name: value for name, value in vars(hardware).items() if value is not None}
    measured = {
        "cards_per_node": world_size, "memory": memory / world_size, "peak_flops": {precision.value: flops}, "memory_bandwidth": copied / GB,
        "intra_node_bandwidth": copied / GB, "inter_node_bandwidth": copied / GB, "host_memory": memory,
        "host_memory_bandwidth": copied / GB * world_size, "host_link_bandwidth": copied / GB,
    }  # fmt: skip
    return replace(hardware, **{**measured, **stated})


def measure_matmul(dtype: torch.dtype) -> float:
    """FLOP/s of a square matrix product with torch's present number of threads: the best of a few."""
    left, right = (torch.randn(_MATRIX, _MATRIX).to(dtype) for _ in range(2))
    return 2 * _MATRIX**3 / _best_seconds(lambda: left @ right)


def measure_copy() -> float:
    """Bytes a second that a copy reads and writes, together."""
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
