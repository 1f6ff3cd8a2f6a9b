"""How long a rank is kept by those that share its sequences: whoever measures it is called around every exchange."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class ExchangeObserver(Protocol):
    """Is called on the thread that runs a pass, from where it asks for what other ranks send to where that is there: on
    a GPU in the order of its stream. What is under way beside a rank's work is no part of it."""

    def start_exchange(self) -> None: ...

    def finish_exchange(self) -> None: ...


class Exchanges:
    """Those of one group of ranks. observer: None while nobody measures."""

    def __init__(self) -> None:
        self.observer: ExchangeObserver | None = None

    @contextmanager
    def observed(self) -> Iterator[None]:
        """Around one of them."""
        observer = self.observer
        if observer is not None:
            observer.start_exchange()
        yield
        if observer is not None:
            observer.finish_exchange()
