"""The machines a plan is made for: a row of `conf/hardware/`, or this machine, measured on the spot."""

from __future__ import annotations

from dataclasses import dataclass

from errors import UserError
from training.config.schema import Device, HardwareConfig, Precision
from training.distributed.host_speed import measure_host

GIB = 2**30
GB = 10**9
STREAM_RATE = 0.8  # of a data sheet's bandwidth, what kernels that move long rows reach
UNMEASURED = ("price_per_hour", "multiprocessors")  # null for not known


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
    measured = measure_host(precision, world_size) if len({*stated, *UNMEASURED}) < len(vars(hardware)) else {}
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
