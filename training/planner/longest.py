"""The longest rows that fit: plans of a run again at other lengths, from the layers that were resolved once."""

from __future__ import annotations

from collections.abc import Callable

from training.planner.plan import Plan

_STEP = 1024  # tokens


def find_longest(plan: Plan, fits: Callable[[int], bool], most: int) -> int | None:
    """Return the largest `max_seq_length` that fits, all other keys as they are, to 1,024 tokens or to an eighth of it;
    None where not even 1,024 tokens fit. fits: whether the plan does at another length. most: the longest rows to look
    at."""
    fitting, too_long = (plan.run.config.max_seq_length, None) if plan.fits else (0, plan.run.config.max_seq_length)
    while too_long is None and fitting < most:
        longer = min(2 * fitting, most)
        fitting, too_long = (longer, None) if fits(longer) else (fitting, longer)
    while too_long is not None and too_long - fitting > max(_STEP, fitting // 8):
        middle = -(-(fitting + too_long) // 2 // _STEP) * _STEP  # rounded up
        if middle >= too_long:
            middle -= _STEP
        if middle <= fitting:
            break
        fitting, too_long = (middle, too_long) if fits(middle) else (fitting, middle)
    return fitting or None
