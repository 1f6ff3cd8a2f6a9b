"""When evaluations and saves are due: every N steps, or every N epochs."""

from __future__ import annotations

from fractions import Fraction


def steps_between(steps: int | None, epochs: float | None, steps_per_epoch: int) -> Fraction | None:
    """Return the interval in steps, not always a whole number; None when neither key is given.

    steps, epochs: the values of two keys of which at most one is given, such as `eval_steps` and `eval_epochs`.
    """
    if epochs is not None:
        return Fraction(str(epochs)) * steps_per_epoch  # from the decimal as written: 0.1 is a tenth
    return None if steps is None else Fraction(steps)


def is_due(step: int, every: Fraction | None) -> bool:
    """Return whether the step (from 1) is the first at or after a multiple of `every`."""
    return every is not None and step // every > (step - 1) // every


def describe_cadence(steps: int | None, epochs: float | None) -> str:
    """Return the interval in words, for the panel at the start of a run."""
    if epochs is not None:
        return ("every epoch" if epochs == 1 else f"every {epochs:g} epochs") + " and at the end"
    if not steps:
        return "at the end"
    return ("every step" if steps == 1 else f"every {steps} steps") + " and at the end"
