"""The learning rate: a pure function of the step, so that a resumed run has nothing to restore."""

from __future__ import annotations

import math

from training.config.schema import RunConfig, SchedulerType


def learning_rate_at(step: int, total_steps: int, config: RunConfig) -> float:
    """Learning rate of optimizer step `step` (from 0) in a schedule of `total_steps`.

    Linear warm-up over the first `warmup_ratio` of the steps (its first step already learns), then down to
    `min_lr_ratio * learning_rate`, reached in the last step.
    """
    warmup_steps = math.ceil(config.warmup_ratio * total_steps)
    if step < warmup_steps:
        return config.learning_rate * (step + 1) / (warmup_steps + 1)
    if config.lr_scheduler_type is SchedulerType.constant:
        return config.learning_rate
    progress = (step - warmup_steps) / max(1, total_steps - 1 - warmup_steps)
    if config.lr_scheduler_type is SchedulerType.cosine:
        remaining = 0.5 * (1 + math.cos(math.pi * progress))
    else:
        remaining = 1 - progress
    return config.learning_rate * (config.min_lr_ratio + (1 - config.min_lr_ratio) * remaining)
