"""`skip_data_intervals`: steps whose global batches are skipped, such as those around a loss spike.

Weights, optimizer state and token count do not change, but the step number advances, and with it the learning rate
schedule and the order of samples: the steps after an interval see the same data as without it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

Intervals = Sequence[Sequence[int]]  # [first, last], steps from 1, both included


def is_skipped(step: int, intervals: Intervals) -> bool:
    """Return whether a step (from 1) lies in one of the intervals."""
    return any(first <= step <= last for first, last in intervals)


def count_trained(start: int, end: int, intervals: Intervals) -> int:
    """Return the number of steps from `start` to `end` (from 0, exclusive) that are in none of the intervals."""
    return sum(stop - first for first, stop in _list_spans(start, end, intervals))


def iterate_trained(loader: Any, start: int, end: int, intervals: Intervals) -> Any:
    """Return an iterator over the micro-batches of a training loader from step `start` to `end` (from 0, exclusive),
    without those of the intervals."""
    spans = list(_list_spans(start, end, intervals))
    if len(spans) == 1:
        return loader.iterate(*spans[0])
    return chain.from_iterable(loader.iterate(*span) for span in spans)


def _list_spans(start: int, end: int, intervals: Intervals) -> Iterator[tuple[int, int]]:
    for first, last in sorted(map(tuple, intervals)):
        if start < first - 1:
            yield start, min(first - 1, end)
        start = max(start, last)
        if start >= end:
            return
    if start < end:
        yield start, end
