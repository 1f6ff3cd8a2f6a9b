"""When evaluations and saves are due."""

from __future__ import annotations

import pytest

from training.inputs.cadence import describe_cadence, is_due, steps_between


@pytest.mark.parametrize(
    ("steps", "epochs", "due"),
    [
        (None, None, []),
        (3, None, [3, 6, 9]),
        (None, 1, [5, 10]),
        (None, 2, [10]),
        (None, 0.5, [3, 5, 8, 10]),  # the first step at or after 2.5, 5, ...
        (None, 0.1, list(range(1, 11))),  # more often than once in a step
        (None, 0.3, [2, 3, 5, 6, 8, 9]),
    ],
)
def test_due_steps_of_two_epochs_of_five(steps: int | None, epochs: float | None, due: list[int]) -> None:
    every = steps_between(steps, epochs, steps_per_epoch=5)
    assert [step for step in range(1, 11) if is_due(step, every)] == due


def test_a_tenth_of_an_epoch_is_not_a_little_more() -> None:
    every = steps_between(None, 0.1, steps_per_epoch=30)
    assert [step for step in range(1, 31) if is_due(step, every)] == list(range(3, 31, 3))


def test_description() -> None:
    assert describe_cadence(None, None) == "at the end"
    assert describe_cadence(1, None) == "every step and at the end"
    assert describe_cadence(20, None) == "every 20 steps and at the end"
    assert describe_cadence(None, 1.0) == "every epoch and at the end"
    assert describe_cadence(None, 0.5) == "every 0.5 epochs and at the end"
