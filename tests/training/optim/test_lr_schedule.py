"""The learning rate of every step, against formulas written out here, and against transformers."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from support.configs import build_config
from transformers import get_scheduler

from training.optim.lr_schedule import learning_rate_at, warn_of_warmup


def rates(total_steps: int, *overrides: str) -> list[float]:
    config = build_config("learning_rate=0.5", "min_lr_ratio=0.2", *overrides)
    return [learning_rate_at(step, total_steps, config) for step in range(total_steps)]


def test_a_warm_up_beyond_the_run_is_named() -> None:
    for steps, total, keys in [(8, 10, ()), (0, 1, ()), (9, 10, ("lr_scheduler_type=constant",))]:
        assert warn_of_warmup(total, build_config(f"warmup_steps={steps}", *keys)) is None
    assert "its learning rate ends at 2e-05" in (warn_of_warmup(10, build_config("warmup_steps=9")) or "")  # its peak
    assert warn_of_warmup(1, build_config()) is None
    assert warn_of_warmup(10, build_config("learning_rate=0.5", "warmup_steps=99")) == (
        "warmup_steps=99 is a warm-up of 99 steps, and the run has 10: its learning rate ends at 0.05"
    )
    assert "warmup_ratio=1.0 is a warm-up of 10 steps" in (warn_of_warmup(10, build_config("warmup_ratio=1")) or "")


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


def transformers_rates(name: str, total_steps: int, warmup_steps: int, **options: object) -> list[float]:
    """All steps of a run of `total_steps` but the first, in which nothing is learned, and the one after it."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    schedule = get_scheduler(name, optimizer, warmup_steps, total_steps, scheduler_specific_kwargs=options)
    found = []
    for _ in range(total_steps):
        optimizer.step()
        schedule.step()
        found.append(schedule.get_last_lr()[0])
    return found


@pytest.mark.parametrize("warmup_steps", [0, 1, 6])
@pytest.mark.parametrize(
    ("theirs", "options", "ours"),
    [
        ("constant_with_warmup", {}, ["lr_scheduler_type=constant"]),
        ("linear", {}, ["lr_scheduler_type=linear"]),
        ("cosine", {}, ["lr_scheduler_type=cosine"]),
        ("cosine_with_min_lr", {"min_lr_rate": 0.3}, ["lr_scheduler_type=cosine", "min_lr_ratio=0.3"]),
        ("cosine_with_restarts", {"num_cycles": 3}, ["lr_scheduler_kwargs.num_cycles=3"]),
        ("polynomial", {"power": 2.0, "lr_end": 0.15}, ["lr_scheduler_kwargs.power=2", "min_lr_ratio=0.3"]),
        ("polynomial", {"power": 0.5, "lr_end": 0.0}, ["lr_scheduler_kwargs.power=0.5"]),
        *(
            (
                "warmup_stable_decay",
                {"num_decay_steps": 8, "decay_type": theirs},
                ["lr_scheduler_kwargs.decay_ratio=0.2", f"lr_scheduler_kwargs.decay_type={ours}"],
            )
            for theirs, ours in {"linear": "linear", "cosine": "cosine", "1-sqrt": "sqrt"}.items()
        ),
    ],
)
def test_the_schedules_of_transformers_without_their_first_step(
    theirs: str, options: dict[str, object], ours: list[str], warmup_steps: int
) -> None:
    """transformers has one more warm-up step, with a rate of 0: here the first step learns, and the last one is at the
    minimum."""
    name = {"warmup_stable_decay": "wsd"}.get(theirs, theirs)
    named = ours if ours and ours[0].startswith("lr_scheduler_type") else [f"lr_scheduler_type={name}", *ours]
    config = build_config("learning_rate=0.5", f"warmup_steps={warmup_steps}", "min_lr_ratio=0", *named)
    found = [learning_rate_at(step, 40, config) for step in range(40)]
    assert found == pytest.approx(transformers_rates(theirs, 40, warmup_steps + 1, **options), rel=1e-12, abs=1e-16)


def test_a_minimum_under_wsd_and_restarts() -> None:
    wsd = rates(10, "warmup_steps=0", "lr_scheduler_type=wsd", "lr_scheduler_kwargs.decay_ratio=0.4")
    assert wsd == pytest.approx([0.5] * 6 + [0.4, 0.3, 0.2, 0.1])
    restarts = rates(9, "warmup_steps=0", "lr_scheduler_type=cosine_with_restarts", "lr_scheduler_kwargs.num_cycles=2")
    fall = 0.1 + 0.4 * np.cos(np.pi / 2 * np.arange(4) / 4) ** 2
    assert restarts == pytest.approx([*fall, *fall, 0.1])


def test_a_decay_that_is_longer_than_what_the_warm_up_leaves() -> None:
    found = rates(10, "warmup_steps=7", "lr_scheduler_type=wsd", "lr_scheduler_kwargs.decay_ratio=0.5")
    assert found[6:] == pytest.approx([0.5 * 7 / 8, 0.5, 0.3, 0.1])


def test_defaults_of_the_warm_up_and_of_each_schedule() -> None:
    assert rates(100) == rates(100, "warmup_ratio=0.03") == rates(100, "warmup_steps=3")
    assert rates(9, "lr_scheduler_type=polynomial") == pytest.approx(rates(9, "lr_scheduler_type=linear"))
    assert rates(9, "lr_scheduler_type=cosine_with_restarts") == rates(9)
    named = ("lr_scheduler_type=wsd", "lr_scheduler_kwargs.decay_ratio=0.1", "lr_scheduler_kwargs.decay_type=linear")
    assert rates(50, "lr_scheduler_type=wsd") == rates(50, *named)
