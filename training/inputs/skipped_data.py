"""`skip_data_intervals`: steps whose global batches are passed over, such as those of a loss that jumped.

The weights, the optimizer and the count of tokens stay as they are, the number of the step goes on, and with it the
schedule and the order of samples: the steps behind an interval see what they would have seen without it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

Intervals = Sequence[Sequence[int]]  # [first, last], steps from 1, both included


def is_skipped(step: int, intervals: Intervals) -> bool:
    return any(first <= step <= last for first, last in intervals)


def iterate_trained(loader: Any, start: int, end: int, intervals: Intervals) -> Any:
    """The micro-batches of a training loader from step `start` up to but not `end` (from 0), less those of the
    intervals."""
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
