"""A figure over the steps of a run, in a bounded number of points, however long the run is."""

from __future__ import annotations

from dataclasses import dataclass

MOST_POINTS = 800  # about what a chart has pixels for


@dataclass
class CurveBucket:
    """The values of neighbouring reports. step: of the last of them."""

    step: int
    low: float
    high: float
    total: float
    count: int

    def merge(self, other: CurveBucket) -> None:
        self.step = other.step
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)
        self.total, self.count = self.total + other.total, self.count + other.count


class Curve:
    """The mean, and the range, of a figure in buckets of `width` steps. When there are more than MOST_POINTS buckets,
    neighbours are merged into buckets of twice the width, so a spike stays visible as the range of its bucket."""

    def __init__(self) -> None:
        self.width = 1
        self.buckets: list[CurveBucket] = []

    def add(self, step: int, value: float) -> None:
        """Add the next value. step: not before that of the last one."""
        self._append(CurveBucket(step, value, value, value, 1))
        while len(self.buckets) > MOST_POINTS:
            self.width *= 2
            buckets, self.buckets = self.buckets, []
            for bucket in buckets:
                self._append(bucket)

    def _append(self, bucket: CurveBucket) -> None:
        if self.buckets and self.buckets[-1].step // self.width == bucket.step // self.width:
            self.buckets[-1].merge(bucket)
        else:
            self.buckets.append(bucket)

    def describe(self) -> dict[str, list[float]]:
        """Return the points as lists, ready for JSON: `step` and `mean`, and where values were merged `low` and `high`;
        six significant digits."""
        points: dict[str, list[float]] = {
            "step": [bucket.step for bucket in self.buckets],
            "mean": [_shorten(bucket.total / bucket.count) for bucket in self.buckets],
        }
        if any(bucket.count > 1 for bucket in self.buckets):
            points["low"] = [_shorten(bucket.low) for bucket in self.buckets]
            points["high"] = [_shorten(bucket.high) for bucket in self.buckets]
        return points


def _shorten(value: float) -> float:
    return float(f"{value:.6g}")
