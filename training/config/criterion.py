"""Which of two evaluations is better: what `metric_for_best_model` and `greater_is_better` say."""

from __future__ import annotations

import math
from dataclasses import dataclass

from training.config.schema import RunConfig


@dataclass(frozen=True)
class Criterion:
    """metric: as evaluations report it, such as `eval_loss`."""

    metric: str = "eval_loss"
    greater_is_better: bool = False

    @classmethod
    def of(cls, config: RunConfig) -> Criterion:
        """As the Hugging Face Trainer reads the keys: the prefix may be left out, and where nothing is said, less of
        what ends in "loss" is better, and more of everything else."""
        name = config.metric_for_best_model
        metric = name if name.startswith("eval_") else f"eval_{name}"
        greater = config.greater_is_better
        return cls(metric, not metric.endswith("loss") if greater is None else greater)

    def is_better(self, value: float, than: float, threshold: float = 0.0) -> bool:
        """By more than `threshold`; NaN is worse than any number."""
        if math.isnan(value) or math.isnan(than):
            return math.isnan(than) and not math.isnan(value)
        return (value - than if self.greater_is_better else than - value) > threshold

    def sort_key(self, value: float) -> float:
        """The better, the lower. value: not NaN."""
        return -value if self.greater_is_better else value
