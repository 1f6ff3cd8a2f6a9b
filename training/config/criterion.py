"""The comparison of evaluations, by `metric_for_best_model` and `greater_is_better`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from training.config.schema import RunConfig


@dataclass(frozen=True)
class Criterion:
    """The metric that evaluations are compared by. metric: as evaluations report it, such as `eval_loss`."""

    metric: str = "eval_loss"
    greater_is_better: bool = False

    @classmethod
    def of(cls, config: RunConfig) -> Criterion:
        """Return the criterion of a config. As in the Hugging Face Trainer, the prefix may be omitted, and by default
        lower is better for a metric that ends in "loss", or in a number after it, and higher for any other."""
        name = config.metric_for_best_model
        metric = name if name.startswith("eval_") else f"eval_{name}"
        greater = config.greater_is_better
        return cls(metric, re.search(r"loss(_\d+)?$", metric) is None if greater is None else greater)

    def is_better(self, value: float, than: float, threshold: float = 0.0) -> bool:
        """Return whether `value` is better by more than `threshold`; NaN is worse than any number."""
        if math.isnan(value) or math.isnan(than):
            return math.isnan(than) and not math.isnan(value)
        return (value - than if self.greater_is_better else than - value) > threshold

    def sort_key(self, value: float) -> float:
        """Return a key that is lower for a better value. value: not NaN."""
        return -value if self.greater_is_better else value
