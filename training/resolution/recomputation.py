"""`activation_checkpoint_interval=auto`: the least recomputation that fits a GPU by the plan, but for `selective` where
the host would be its limit: operator by operator, under two dispatch modes of torch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from errors import UserError
from training.config.schema import CheckpointMode
from training.costs.hardware import GIB, Machine

Choice = tuple[CheckpointMode, int]  # mode, interval

# From keeping all activations to making all of them again
CHOICES: tuple[Choice, ...] = (
    (CheckpointMode.grouped, 0),
    (CheckpointMode.selective, 1),
    (CheckpointMode.every, 4),
    (CheckpointMode.every, 2),
    (CheckpointMode.grouped, 1),
)
MARGIN = 0.05  # of a GPU's usable memory: the plan's error (tests/training/planner/test_plan_against_engine.py)
_KEY = "activation_checkpoint_interval=auto"


def choose_recomputation(
    machine: Machine | None, measure: Callable[[Choice], float], is_host_bound: Callable[[Choice], bool]
) -> tuple[Choice, str]:
    """Return the first of `CHOICES` whose peak leaves `MARGIN` free and which no host holds up, else the last, and a
    line that says so.

    machine: None where no file of conf/hardware describes the GPU, or on a CPU; then the last one is taken. measure:
    returns the bytes that a choice takes on the fullest GPU, and raises UserError where it does not go with another key
    or with the layers; so does this function for the last one. is_host_bound: returns whether the host takes longer to
    launch what a choice runs again than the GPU takes to run it.
    """
    last = CHOICES[-1]
    if machine is None:
        return last, f"{_KEY}: {_describe(last)}, as no file of conf/hardware describes this device"
    limit, too_large, held_up = (1 - MARGIN) * machine.usable_bytes, list[str](), list[str]()

    def explain(choice: Choice, peak: float) -> str:
        taken = f"{peak / GIB:.1f} of {machine.usable_bytes / GIB:.1f} GiB on the fullest GPU by the plan"
        larger = f"; {MARGIN:.0%} stay free, so not {', '.join(too_large)}" if too_large else ""
        slower = f"; not {held_up[0]}, which the host launches more slowly than the GPU runs it" if held_up else ""
        return f"{_KEY}: {_describe(choice)}, {taken}{larger}{slower}"

    for choice in CHOICES[:-1]:
        with suppress(UserError):
            peak = measure(choice)
            if peak > limit:
                too_large.append(f"{_describe(choice)} {peak / GIB:.1f}")
            elif is_host_bound(choice):
                held_up.append(_describe(choice))
            else:
                return choice, explain(choice, peak)
    return last, explain(last, measure(last))


def _describe(choice: Choice) -> str:
    mode, interval = choice
    return str(interval) if mode is CheckpointMode.grouped else f"{interval} ({mode.value})"
