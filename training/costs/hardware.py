"""The machines a plan is made for: a row of `conf/hardware/`, or this machine, measured on the spot."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from errors import UserError
from training.config.precision import DTYPES
from training.config.schema import Device, HardwareConfig, Precision
from training.distributed.host_memory import measure_host_memory

GIB = 2**30
GB = 10**9
STREAM_RATE = 0.8  # of a data sheet's bandwidth, what kernels that move long rows reach
UNMEASURED = ("price_per_hour", "multiprocessors")  # null for not known
_MATRIX, _ROUNDS = 1024, 5


@dataclass(frozen=True)
class Machine:
    """A `HardwareConfig` without a null, but that price and multiprocessors may not be known; the units are its own."""

    name: str
    device: Device
    cards_per_node: int
    memory: float
    usable_memory: float
    peak_flops: dict[str, float]
    efficiency: float
    memory_bandwidth: float
    intra_node_bandwidth: float
    inter_node_bandwidth: float
    host_memory: float
    host_memory_bandwidth: float
    host_link_bandwidth: float
    device_name: str
    switched: bool = True
    price_per_hour: float | None = None
    multiprocessors: int | None = None
    flash_attention_2: float = 1.0

    @property
    def stream_rate(self) -> float:
        """Bytes a second that kernels which move long rows read and write; a CPU's bandwidth is that of such work."""
        return self.memory_bandwidth * GB * (STREAM_RATE if self.device is Device.cuda else 1)

    @property
    def usable_bytes(self) -> float:
        """The usable bytes of one GPU's memory."""
        return self.memory * self.usable_memory * GIB

    def rate_to(self, peers: int | None) -> float:
        """Return the GB/s that a GPU sends to so many others of its node at once, in all; None: what it could send to
        any. Without a switch it has a link to each, and so many of them are used."""
        if self.switched or peers is None:
            return self.intra_node_bandwidth
        return self.intra_node_bandwidth * min(1.0, peers / max(1, self.cards_per_node - 1))


# A core, to split and order a run by: only the ratio of its rates counts
ANY_CPU = Machine(
    name="any CPU", device=Device.cpu, cards_per_node=2**20, memory=16, usable_memory=1.0,
    peak_flops=dict.fromkeys(("fp32", "bf16", "fp16"), 50e9), efficiency=0.8, memory_bandwidth=10,
    intra_node_bandwidth=1, inter_node_bandwidth=1, host_memory=16, host_memory_bandwidth=10, host_link_bandwidth=10,
    device_name="cpu",
)  # fmt: skip


def complete_hardware(hardware: HardwareConfig, precision: Precision, world_size: int) -> Machine:
    """Return `hardware` with every null measured on this machine, its cores and memory shared by `world_size` ranks.

    Raises UserError where no peak is known for the precision.
    """
    stated = list_stated(hardware)
    measured = _measure(precision, world_size) if len({*stated, *UNMEASURED}) < len(vars(hardware)) else {}
    machine = Machine(**{**measured, **{name: getattr(hardware, name) for name in stated}})
    if precision.value not in machine.peak_flops:
        raise UserError(
            f"precision={precision.value}: hardware={hardware.name} has no peak for it; "
            f"add it to conf/hardware/{hardware.name}.yaml"
        )
    return machine


def list_stated(hardware: HardwareConfig) -> set[str]:
    """Return the names of the fields that are not null."""
    return {name for name, value in vars(hardware).items() if value is not None}


def _measure(precision: Precision, world_size: int) -> dict[str, Any]:
    """Measure every field that can be null."""
    cores = len(os.sched_getaffinity(0))
    memory = measure_host_memory() / GIB
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, cores // world_size))
    share = min(1.0, cores / world_size)  # more ranks than cores share them
    try:
        flops, copied = measure_matmul(DTYPES[precision]) * share, measure_copy() * share
    finally:
        torch.set_num_threads(threads)
    return {
        "cards_per_node": world_size, "memory": memory / world_size, "peak_flops": {precision.value: flops},
        "memory_bandwidth": copied / GB, "intra_node_bandwidth": copied / GB, "inter_node_bandwidth": copied / GB,
        "host_memory": memory, "host_memory_bandwidth": copied / GB * world_size, "host_link_bandwidth": copied / GB,
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
