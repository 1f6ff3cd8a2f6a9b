"""The picture: it is written, and a long step is shown by its ends."""

from __future__ import annotations

from pathlib import Path

from matplotlib import image

from training.plan_picture import MICRO_BATCHES_SHOWN, choose_windows, draw_schedule
from training.plan_schedule import simulate

STAGES = 4


def test_a_picture_with_both_colors(tmp_path: Path) -> None:
    file = tmp_path / "schedule.png"
    draw_schedule(simulate([1.0] * STAGES, [2.0] * STAGES, [0.1] * (STAGES - 1), 6), "pp4", file)
    pixels = image.imread(file)[..., :3].reshape(-1, 3)
    reddish, bluish = pixels[:, 0] > pixels[:, 2] + 0.3, pixels[:, 2] > pixels[:, 0] + 0.3
    assert 1.5 < reddish.sum() / bluish.sum() < 2.5  # backward takes twice as long as forward


def test_a_long_step_is_shown_by_its_ends() -> None:
    short = simulate([1.0] * STAGES, [2.0] * STAGES, [0.0] * (STAGES - 1), 2 * MICRO_BATCHES_SHOWN * STAGES)
    end = max(p.stop for p in short)
    assert choose_windows(short, STAGES) == [(0.0, end)]
    long = simulate([1.0] * STAGES, [2.0] * STAGES, [0.0] * (STAGES - 1), 100)
    (start, first), (last, stop) = choose_windows(long, STAGES)
    assert start == 0 < first < last < stop == max(p.stop for p in long)
