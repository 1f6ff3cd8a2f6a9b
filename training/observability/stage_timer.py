"""The timing of a step on this rank: a time mark after each unit of the engine's schedule (forward pass, receive, ...).

On an accelerator a mark is an event in the stream, read at the end of the step, so no unit waits. On a CPU it is the
time of the host's clock.

The gradient norm makes all ranks wait for the slowest inside `OptimizerStep`. An all-reduce of one number just before
absorbs that wait, which separates it from the optimizer's work; the wait would occur in the norm otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, fields
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from training.engine.engine import BACKWARD, FORWARD, OPTIMIZER, REDUCTIONS, TRANSFERS, WEIGHTS, Engine

_IN_PIPELINE = (FORWARD, BACKWARD, WEIGHTS, *TRANSFERS)
_ALIGNED = "Aligned"
EXCHANGE = "Exchange"  # inside a pass, with the ranks that share its sequences


@dataclass(frozen=True)
class Span:
    """One unit of a step, or an exchange inside one; seconds from the step's start."""

    name: str
    start: float
    stop: float


@dataclass
class RankTimes:
    """The times of one rank in seconds, summed over `num_steps` steps, and its memory in bytes.

    pipeline: from the start of a step to the end of this rank's last pass and transfer. reduce: all-reduce of gradients
    over replicas and tied stages. weights: deferred weight gradients; not in `backward`. exchange: time in passes that
    attention waited for the ranks that share its sequences. recv_activation, ...: the time of all such transfers if
    each were as fast as the fastest of its step; the rest is waiting.
    """

    num_steps: float = 0
    step: float = 0
    forward: float = 0
    backward: float = 0
    weights: float = 0
    exchange: float = 0
    optimizer: float = 0
    reduce: float = 0
    pipeline: float = 0
    recv_activation: float = 0
    send_grad: float = 0
    send_activation: float = 0
    recv_grad: float = 0
    peak_memory: float = 0

    def add(self, spans: Sequence[Span], step_seconds: float) -> None:
        """Count one step."""
        seconds: dict[str, list[float]] = {}
        for span in spans:
            seconds.setdefault(span.name, []).append(span.stop - span.start)
        self.num_steps += 1
        self.step += step_seconds
        self.forward += sum(seconds.get(FORWARD, ()))
        self.backward += sum(seconds.get(BACKWARD, ()))
        self.weights += sum(seconds.get(WEIGHTS, ()))
        self.exchange += sum(seconds.get(EXCHANGE, ()))
        self.optimizer += sum(seconds.get(OPTIMIZER, ()))
        self.reduce += sum(sum(seconds.get(name, ())) for name in REDUCTIONS)
        self.pipeline += max(span.stop for span in spans if span.name in _IN_PIPELINE)
        pure = [min(seconds[name]) * len(seconds[name]) if name in seconds else 0.0 for name in TRANSFERS]
        self.recv_activation += pure[0]
        self.send_grad += pure[1]
        self.send_activation += pure[2]
        self.recv_grad += pure[3]


class StageTimer:
    """A timer of the training steps of one engine, with the pass before each: the `StepObserver` of the engine and of
    its exchanges. Call `attach` before the first step."""

    def __init__(self, engine: Engine, memory: MemoryPeak, auxiliary: Engine | None = None) -> None:
        """auxiliary: of a frozen model that runs before each step, if any."""
        self._engines = (engine,) if auxiliary is None else (engine, auxiliary)
        self._device, self._memory = engine.device, memory
        self._marks, self._exchange_marks = self._make_marks(), self._make_marks()
        self._number = torch.zeros(1, device=self._device)
        self._names: list[str] = []
        self._is_running = False
        self._times = RankTimes()

    def _make_marks(self) -> _HostMarks | _DeviceMarks:
        return _HostMarks() if self._device.type == "cpu" else _DeviceMarks(self._device)

    def attach(self) -> None:
        """Observe the engine, and reset the memory peak."""
        self._memory.start()
        self._observe(self)

    def detach(self) -> None:
        """Stop observing the engine."""
        self._observe(None)

    def _observe(self, observer: StageTimer | None) -> None:
        for engine in self._engines:
            engine.observe(observer)
            ranks = engine.module.ranks
            for exchanges in (ranks.sequence_part.exchanges, ranks.expert_parallel.exchanges):
                exchanges.observer = observer

    def before(self, unit: str) -> None:
        if unit == OPTIMIZER and self._is_running:  # else it is an evaluation
            dist.all_reduce(self._number)
            self._mark(_ALIGNED)

    def after(self, unit: str) -> None:
        if self._is_running:
            self._mark(unit)

    def start_exchange(self) -> None:
        if self._is_running:
            self._exchange_marks.add()

    def finish_exchange(self) -> None:
        if self._is_running:
            self._exchange_marks.add()

    def _mark(self, name: str) -> None:
        self._names.append(name)
        self._marks.add()

    def start_step(self) -> None:
        self._names, self._is_running = [], True
        self._since = time.perf_counter()
        self._marks.start()
        self._exchange_marks.start()

    def finish_step(self) -> list[Span]:
        """Count the step that has just ended, and return its spans: units in order, then exchanges."""
        self._is_running = False
        stops = self._marks.read()
        spans = [Span(name, start, stop) for name, start, stop in zip(self._names, [0.0, *stops], stops)]
        if spans:
            ends = self._exchange_marks.read()
            spans += [Span(EXCHANGE, start, stop) for start, stop in zip(ends[::2], ends[1::2], strict=True)]
            self._times.add(spans, time.perf_counter() - self._since)
        return spans

    def list_finished(self) -> list[tuple[str, float]]:
        """Return (unit, seconds from the start of the step) of the units of the running step that are done. For another
        thread."""
        return list(zip(self._names.copy(), self._marks.read_finished()))

    def gather(self) -> list[RankTimes]:
        """Return the times of all ranks since the last call, in the order of ranks. All ranks call it; it is one small
        collective."""
        self._times.peak_memory = self._memory.read()
        own = torch.tensor(astuple(self._times), dtype=torch.float64, device=self._device)
        rows = [
            torch.empty(len(fields(RankTimes)), dtype=torch.float64, device=self._device)
            for _ in range(dist.get_world_size())
        ]
        dist.all_gather(rows, own)
        self._times = RankTimes()
        return [RankTimes(*row.tolist()) for row in rows]


class _HostMarks:
    """Marks of the host's clock. On a CPU an operator is done when its call returns."""

    def start(self) -> None:
        self._times: list[float] = []
        self._start = time.perf_counter()

    def add(self) -> None:
        self._times.append(time.perf_counter())

    def read(self) -> list[float]:
        """Return the seconds from the start to each mark."""
        return [stop - self._start for stop in self._times.copy()]

    read_finished = read


class _DeviceMarks:
    """Events in the device's stream, which are reused in each step."""

    def __init__(self, device: torch.device) -> None:
        self._make = torch.get_device_module(device).Event
        self._events: list[Any] = []

    def start(self) -> None:
        self._used = 0
        self.add()

    def add(self) -> None:
        if self._used == len(self._events):
            self._events.append(self._make(enable_timing=True))
        self._events[self._used].record()
        self._used += 1

    def read(self) -> list[float]:
        first, *others = self._events[: self._used]
        self._events[self._used - 1].synchronize()
        return [first.elapsed_time(event) / 1000 for event in others]

    def read_finished(self) -> list[float]:
        """Return the seconds from the start to each mark that the stream has passed; waits for none."""
        first, *others = self._events[: self._used]
        return [first.elapsed_time(event) / 1000 for event in takewhile(_is_done, others)]


def _is_done(event: Any) -> bool:
    return event.query()


class MemoryPeak:
    """The peak memory of training: of the device's allocator, or on a CPU the resident memory of this process above its
    value when this object was built, without files mapped since then, as that of the weights is: they are as large as
    the weights read from them, and the system takes their pages back when it needs them."""

    _STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before, self._mapped = self._resident("VmRSS"), self._count_mapped()

    def start(self) -> None:
        """Reset the peak, which excludes the start of the run: reading weights, building stages."""
        if self._device.type != "cpu":
            torch.get_device_module(self._device).reset_peak_memory_stats(self._device)
        else:
            with suppress(OSError):  # a container may forbid it; then the start counts too
                self._CLEAR.write_text("5")  # proc(5): the peak becomes what is resident now
            mapped = self._count_mapped()
            self._before, self._mapped = self._before + mapped - self._mapped, mapped

    def read(self) -> int:
        """Return the peak in bytes; 0 when the system does not report it."""
        if self._device.type != "cpu":
            return torch.get_device_module(self._device).max_memory_allocated(self._device)
        return max(0, self._resident("VmHWM") - self._before)

    def _count_mapped(self) -> int:
        return self._resident("RssFile") + self._resident("RssShmem")  # the latter: files in memory

    def _resident(self, key: str) -> int:
        if self._device.type != "cpu" or not self._STATUS.exists():
            return 0
        lines = self._STATUS.read_text().splitlines()
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:")), 0)
