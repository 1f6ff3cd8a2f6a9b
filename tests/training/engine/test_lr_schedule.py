"""The learning rate of every step, against formulas written out here."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from support.configs import build_config

from training.engine.lr_schedule import learning_rate_at


def rates(total_steps: int, *overrides: str) -> list[float]:
    config = build_config("learning_rate=0.5", "min_lr_ratio=0.2", *overrides)
    return [learning_rate_at(step, total_steps, config) for step in range(total_steps)]


def test_each_schedule_after_its_warm_up() -> None:
    warm_up = [0.5 / 4, 1.0 / 4, 1.5 / 4]  # a quarter of 12 steps; the first learns already, the peak comes after
    down = np.linspace(0, 1, 9)
    expected = {
        "cosine": 0.1 + 0.4 * np.cos(np.pi / 2 * down) ** 2,  # (1 + cos 2x) / 2 = cos^2 x
        "linear": 0.5 - 0.4 * down,
        "constant": np.full(9, 0.5),
    }
    for name, after in expected.items():
        assert rates(12, "warmup_ratio=0.25", f"lr_scheduler_type={name}") == pytest.approx(
            [*warm_up, *after], rel=1e-12
        ), name


@pytest.mark.parametrize("name", ["cosine", "linear"])
def test_the_last_step_is_at_the_minimum(name: str) -> None:
    for total_steps in (2, 7, 1000):
        decayed = rates(total_steps, "warmup_ratio=0", f"lr_scheduler_type={name}")
        assert decayed[0] == 0.5 and decayed[-1] == pytest.approx(0.1, rel=1e-12)
        assert all(a > b for a, b in itertools.pairwise(decayed))


def test_short_runs() -> None:
    assert rates(1, "warmup_ratio=0") == [0.5]
    assert rates(1, "warmup_ratio=0.03") == [0.25]  # one step of warm-up, and the run is over
    assert rates(2, "warmup_ratio=1") == pytest.approx([0.5 / 3, 1.0 / 3])


def test_a_share_of_the_steps_is_rounded_up() -> None:
    assert rates(100, "warmup_ratio=0.03")[:4] == pytest.approx([0.125, 0.25, 0.375, 0.5])
    assert rates(101, "warmup_ratio=0.03")[:5] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])
