"""How well predictions are in the order of what was measured, and what random errors would leave of it."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence

RANDOM_ERROR, DRAWS = 0.07, 200  # the median of random errors, and how often they are drawn


def correlate_ranks(left: Sequence[float], right: Sequence[float]) -> float:
    """Return Spearman's rank correlation; equal values share their mean rank."""
    ranked = [_rank(values) for values in (left, right)]
    return statistics.correlation(*ranked) if len({*ranked[0]}) > 1 and len({*ranked[1]}) > 1 else float("nan")


def _rank(values: Sequence[float]) -> list[float]:
    order: dict[float, list[int]] = {}
    for place, value in enumerate(sorted(values)):
        order.setdefault(value, []).append(place)
    return [statistics.fmean(order[value]) for value in values]


def find_quantile(ordered: Sequence[float], share: float) -> float:
    """Return the value that `share` of the ordered values do not exceed."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def simulate_rank(measured: Sequence[float]) -> float:
    """Return the mean rank correlation of speeds with themselves times log-normal errors of `RANDOM_ERROR` in the
    median: what a plan can reach whose errors have no cause in the layout."""
    draw, spread = random.Random(0), RANDOM_ERROR / statistics.NormalDist().inv_cdf(0.75)
    return statistics.fmean(
        correlate_ranks(measured, [speed * math.exp(draw.gauss(0, spread)) for speed in measured]) for _ in range(DRAWS)
    )
