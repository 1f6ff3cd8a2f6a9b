"""An accelerator for DeepSpeed with streams and events that only count: tensors are the CPU's, and whatever the host
would wait for on a GPU is recorded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator, set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

COUNTS: Counter[str] = Counter()


class CountingStream:
    def synchronize(self) -> None:
        COUNTS["host waits for a stream"] += 1

    def wait_stream(self, other: CountingStream) -> None:
        COUNTS["stream waits for a stream"] += 1


class CountingEvent:
    """One that has always happened."""

    def __init__(self, enable_timing: bool = False) -> None:
        COUNTS["timed events" if enable_timing else "events"] += 1

    def record(self, stream: CountingStream | None = None) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        COUNTS["host waits for an event"] += 1


class CountingAccelerator(CPU_Accelerator):
    Stream, Event = CountingStream, CountingEvent  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__()
        self._default = CountingStream()

    def is_synchronized_device(self) -> bool:
        return False

    def synchronize(self, device_index: int | None = None) -> None:
        COUNTS["host waits for the device"] += 1

    @contextmanager
    def stream(self, stream: CountingStream) -> Iterator[None]:
        yield

    def current_stream(self, device_index: int | None = None) -> CountingStream:
        return self._default

    default_stream = current_stream


@contextmanager
def count_waits() -> Iterator[Counter[str]]:
    """Within this context DeepSpeed sees such an accelerator. Yields what is counted."""
    before, record_stream = get_accelerator(), torch.Tensor.record_stream
    COUNTS.clear()
    set_accelerator(CountingAccelerator())
    torch.Tensor.record_stream = _ignore  # type: ignore[method-assign]
    try:
        yield COUNTS
    finally:
        set_accelerator(before)
        torch.Tensor.record_stream = record_stream  # type: ignore[method-assign]


def _ignore(tensor: torch.Tensor, stream: Any) -> None:
    """A tensor of the host belongs to no stream."""
