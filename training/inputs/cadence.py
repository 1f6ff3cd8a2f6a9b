"""When evaluations and saves are due: every so many steps, or every so many epochs."""

from __future__ import annotations

from fractions import Fraction


def steps_between(steps: int | None, epochs: float | None, steps_per_epoch: int) -> Fraction | None:
    """How many steps lie between two of them, not always a whole number; None where neither key is given.

    steps, epochs: of which one at most is given, such as `eval_steps` and `eval_epochs`.
    """
    if epochs is not None:
        return Fraction(str(epochs)) * steps_per_epoch  # of the decimal that was written: 0.1 is a tenth
    return None if steps is None else Fraction(steps)


def is_due(step: int, every: Fraction | None) -> bool:
    """Whether the step (from 1) is the first at or behind a multiple of `every`."""
    return every is not None and step // every > (step - 1) // every


def describe_cadence(steps: int | None, epochs: float | None) -> str:
    if epochs is not None:
        return ("every epoch" if epochs == 1 else f"every {epochs:g} epochs") + " and at the end"
    return f"every {steps} steps and at the end" if steps else "at the end"
