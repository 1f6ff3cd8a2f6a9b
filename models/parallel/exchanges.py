"""Waiting for other ranks, and measuring how long a rank waits for those that split its sequences: an observer is
called around every exchange."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol


class Pending(Protocol):
    """Another rank's part: torch's `Work` of a transfer, or an event."""

    def wait(self) -> bool: ...


def wait_for(works: Sequence[Pending]) -> None:
    """Wait for other ranks. All waiting for other ranks is done here, so that the watchdog can distinguish a rank that
    waits from one that is stuck."""
    for work in works:
        work.wait()


class ExchangeObserver(Protocol):
    """Called on the thread that runs a pass, before it asks for the data of other ranks and once the data has arrived:
    on a GPU in the order of its stream. Transfers that overlap with a rank's work are not included."""

    def start_exchange(self) -> None: ...

    def finish_exchange(self) -> None: ...


class Exchanges:
    """The exchanges of one group of ranks. observer: None while nothing is measured."""

    def __init__(self) -> None:
        self.observer: ExchangeObserver | None = None

    @contextmanager
    def observed(self) -> Iterator[None]:
        """Notify the observer around one exchange."""
        observer = self.observer
        if observer is not None:
            observer.start_exchange()
        yield
        if observer is not None:
            observer.finish_exchange()
