"""A summary of the trace of one step: the shares of computation, communication and idle time, the longest operators,
and how often the host waited for the device.

Reads the events of a Chrome trace as torch.profiler writes it (kineto; times in microseconds): `cpu_op` and
`cuda_runtime` of the host, `kernel`, `gpu_memcpy` and `gpu_memset` of the device. Pure: no profiler, no device.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from formatting import render_rows, render_seconds

Event = dict[str, Any]
Interval = tuple[float, float]  # start, stop

_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_BY_HOST = ("cpu_op", "cuda_runtime", "cuda_driver")
_COMMUNICATION = ("nccl", "gloo", "c10d::", "c10d_functional::")  # prefixes of names, in lower case
# Calls in which the host waits for the device (an asynchronous copy of pageable memory too), and operators that make
# such calls.
WAITS = (
    "cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy", "cudaMemcpyAsync",
    "aten::item", "aten::_local_scalar_dense", "aten::nonzero",
)  # fmt: skip
_TOP = 15


@dataclass(frozen=True)
class OpTime:
    """All calls of one name in the step."""

    name: str
    calls: int
    seconds: float


@dataclass(frozen=True)
class StepProfile:
    """One step of one rank, in seconds.

    on_device: whether events of a device were recorded; without them, the host counts as the device.
    computing: time in which at least one kernel ran that does not communicate. communicating: time in which only
    communication kernels ran. device_ops: kernels, by time. host_ops: operators, by self time. waits: number of calls
    of each name in `WAITS`.
    """

    on_device: bool
    step: float
    computing: float
    communicating: float
    device_ops: tuple[OpTime, ...]
    host_ops: tuple[OpTime, ...]
    waits: dict[str, int]

    @property
    def idle_share(self) -> float:
        return max(0.0, 1 - (self.computing + self.communicating) / self.step)


def summarize_trace(events: Iterable[Event], annotation: str) -> StepProfile:
    """Summarize a trace. events: of a Chrome trace. annotation: the name of the user annotation around the step.

    Kernels that the device runs after the host has left the step belong to it.
    """
    spans = [event for event in events if event.get("ph") == "X"]
    step = next(e for e in spans if e.get("cat") == "user_annotation" and e["name"] == annotation)
    start, stop = _interval(step)
    device = [event for event in spans if event.get("cat") in _ON_DEVICE and event["ts"] >= start]
    host = [event for event in spans if event.get("cat") in _BY_HOST and start <= event["ts"] <= stop]
    operators = [event for event in host if event["cat"] == "cpu_op"]
    busy = device or operators
    stop = max([stop, *(event["ts"] + event["dur"] for event in device)])
    computing = measure_union(_interval(event) for event in busy if not _communicates(event["name"]))
    counts = Counter(event["name"] for event in host)
    return StepProfile(
        on_device=bool(device),
        step=(stop - start) / 1e6,
        computing=computing / 1e6,
        communicating=(measure_union(map(_interval, busy)) - computing) / 1e6,
        device_ops=_rank_ops((event["name"], event["dur"]) for event in device),
        host_ops=_rank_ops(_self_times(operators)),
        waits={name: counts[name] for name in WAITS if counts[name]},
    )


def _interval(event: Event) -> Interval:
    return event["ts"], event["ts"] + event["dur"]


def _communicates(name: str) -> bool:
    return name.lower().startswith(_COMMUNICATION)


def measure_union(intervals: Iterable[Interval]) -> float:
    """Return the length of the union of the intervals."""
    length, reached = 0.0, float("-inf")
    for start, stop in sorted(intervals):
        length += max(0.0, stop - max(start, reached))
        reached = max(reached, stop)
    return length


def _self_times(operators: Sequence[Event]) -> Iterable[tuple[str, float]]:
    """Yield (name, microseconds) of each call, without the calls within it. Calls of one thread are nested."""
    by_thread: dict[Any, list[Event]] = defaultdict(list)
    for event in operators:
        by_thread[event["pid"], event["tid"]].append(event)
    for calls in by_thread.values():
        calls.sort(key=lambda event: (event["ts"], -event["dur"]))
        inner = [0.0] * len(calls)  # microseconds of the calls directly within each
        around: list[int] = []
        for index, call in enumerate(calls):
            while around and call["ts"] >= _interval(calls[around[-1]])[1]:
                around.pop()
            if around:
                inner[around[-1]] += call["dur"]
            around.append(index)
        yield from ((call["name"], max(0.0, call["dur"] - within)) for call, within in zip(calls, inner, strict=True))


def _rank_ops(calls: Iterable[tuple[str, float]]) -> tuple[OpTime, ...]:
    """Return the names with the most time, in descending order. calls: (name, microseconds)."""
    durations: dict[str, list[float]] = defaultdict(list)
    for name, microseconds in calls:
        durations[name].append(microseconds)
    ops = [OpTime(name, len(times), sum(times) / 1e6) for name, times in durations.items()]
    return tuple(sorted(ops, key=lambda op: -op.seconds)[:_TOP])


def render_profiles(profiles: Sequence[StepProfile], step: int) -> str:
    """Return a table of the ranks, then the longest operators of each. profiles: in the order of ranks."""
    header = ("rank", "step", "computing", "communicating only", "idle", "waits and copies")
    rows = [
        (
            str(rank),
            render_seconds(profile.step),
            f"{profile.computing / profile.step:.1%}",
            f"{profile.communicating / profile.step:.1%}",
            f"{profile.idle_share:.1%}",
            ", ".join(f"{name} {calls}" for name, calls in profile.waits.items()) or "none",
        )
        for rank, profile in enumerate(profiles)
    ]
    measured = "of the device" if profiles[0].on_device else "of the CPU, which is the device"
    title = f"step {step}, slowed by the profiler; shares {measured}"
    blocks = [title, "", *render_rows(header, rows)]
    for rank, profile in enumerate(profiles):
        blocks += _render_ops(f"rank {rank}: kernels by device time", profile.device_ops, profile.step)
        blocks += _render_ops(f"rank {rank}: operators by host time", profile.host_ops, profile.step)
    return "\n".join(blocks) + "\n"


def _render_ops(title: str, ops: Sequence[OpTime], step: float) -> list[str]:
    if not ops:
        return []
    longest = min(80, max(len(op.name) for op in ops))
    rows = [
        (render_seconds(op.seconds), f"{op.seconds / step:.1%}", str(op.calls), op.name[:longest].ljust(longest))
        for op in ops
    ]
    return ["", title, *render_rows(("time", "of the step", "calls", "name".ljust(longest)), rows)]
