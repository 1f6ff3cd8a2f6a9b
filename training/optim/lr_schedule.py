"""The learning rate: a pure function of the step, so that a resumed run has nothing to restore.

With W warm-up steps of N, step s (from 0) has the rate of step s + 1 in the schedule of transformers with W + 1 warm-up
steps: its step 0, with a rate of 0, is omitted, so the first step already learns and the last one is at the minimum.
With `min_lr_ratio`, the decay is scaled to end at the minimum.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from console import pluralize
from training.config.schema import DecayType, RunConfig, SchedulerType

DEFAULT_WARMUP_RATIO = 0.03  # where neither key is given
_DECAYING = ["min_lr_ratio"]
# The keys that each schedule reads, beyond the rate and its warm-up
SCHEDULER_KEYS = {
    "cosine": _DECAYING,
    "cosine_with_restarts": [*_DECAYING, "lr_scheduler_kwargs.num_cycles"],
    "linear": _DECAYING,
    "polynomial": [*_DECAYING, "lr_scheduler_kwargs.power"],
    "constant": [],
    "wsd": [*_DECAYING, "lr_scheduler_kwargs.decay_ratio", "lr_scheduler_kwargs.decay_type"],
}


def learning_rate_at(step: int, total_steps: int, config: RunConfig) -> float:
    """Return the learning rate of optimizer step `step` (from 0) in a schedule of `total_steps`.

    Linear warm-up, then a decay to `min_lr_ratio * learning_rate`, reached in the last step; none with `constant`.
    """
    warmup_steps = count_warmup_steps(total_steps, config)
    if step < warmup_steps:
        return config.learning_rate * (step + 1) / (warmup_steps + 1)
    if config.lr_scheduler_type is SchedulerType.constant:
        return config.learning_rate
    start = warmup_steps
    if config.lr_scheduler_type is SchedulerType.wsd:
        start = max(warmup_steps, total_steps - 1 - count_decay_steps(total_steps, config))
    progress = max(0, step - start) / max(1, total_steps - 1 - start)
    remaining = _REMAINING[config.lr_scheduler_type](progress, config)
    return config.learning_rate * (config.min_lr_ratio + (1 - config.min_lr_ratio) * remaining)


def count_warmup_steps(total_steps: int, config: RunConfig) -> int:
    """Return `warmup_steps`, or `warmup_ratio` of all steps, rounded up."""
    if config.warmup_steps is not None:
        return config.warmup_steps
    ratio = DEFAULT_WARMUP_RATIO if config.warmup_ratio is None else config.warmup_ratio
    return math.ceil(ratio * total_steps)


def warn_of_warmup(total_steps: int, config: RunConfig) -> str | None:
    """Return a warning of a warm-up that leaves no step to decay in; None for a shorter one."""
    given = {"warmup_steps": config.warmup_steps, "warmup_ratio": config.warmup_ratio}
    key = next((f"{name}={value}" for name, value in given.items() if value is not None), None)
    steps = count_warmup_steps(total_steps, config)
    decays = config.lr_scheduler_type is not SchedulerType.constant
    if key is None or steps == 0 or steps < total_steps - decays:
        return None
    last = learning_rate_at(total_steps - 1, total_steps, config)
    warm_up = pluralize(steps, "step")
    return f"{key} is a warm-up of {warm_up}, and the run has {total_steps}: its learning rate ends at {last:.3g}"


def count_decay_steps(total_steps: int, config: RunConfig) -> int:
    """Return the number of steps after the last one at the full rate, in the schedule wsd."""
    ratio = config.lr_scheduler_kwargs.decay_ratio
    return math.ceil((0.1 if ratio is None else ratio) * total_steps)


def _polynomial(progress: float, config: RunConfig) -> float:
    power = config.lr_scheduler_kwargs.power
    return (1 - progress) ** (1.0 if power is None else power)


def _cosine(progress: float, config: RunConfig | None = None) -> float:
    return 0.5 * (1 + math.cos(math.pi * progress))


def _cosine_with_restarts(progress: float, config: RunConfig) -> float:
    """The learning rate jumps back to its peak at the start of each cycle (1608.03983, cycles of equal length)."""
    cycles = config.lr_scheduler_kwargs.num_cycles or 1
    return _cosine(cycles * progress % 1) if progress < 1 else 0.0


def _decay(progress: float, config: RunConfig) -> float:
    """The decay of wsd; 1 - sqrt is the shape that 2405.18392 found best."""
    decay_type = config.lr_scheduler_kwargs.decay_type
    if decay_type is DecayType.cosine:
        return _cosine(progress)
    return 1 - math.sqrt(progress) if decay_type is DecayType.sqrt else 1 - progress


# The fraction of the range above the minimum that remains, by the fraction of the decay that is done.
_REMAINING: dict[SchedulerType, Callable[[float, RunConfig], float]] = {
    SchedulerType.linear: lambda progress, config: 1 - progress,
    SchedulerType.polynomial: _polynomial,
    SchedulerType.cosine: _cosine,
    SchedulerType.cosine_with_restarts: _cosine_with_restarts,
    SchedulerType.wsd: _decay,
}
