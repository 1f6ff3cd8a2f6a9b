"""The picture: what was predicted and what was measured, one below the other; a long step is shown by its ends."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib import image

from training.costs.simulation import simulate
from training.observability.measured_timeline import measured_timeline
from training.observability.stage_timer import Span
from training.pipeline.schedule import OneForwardOneBackward
from training.plan_command.timeline import Timeline, TimelineSpan, Work
from training.plan_command.timeline_plot import COLORS, MICRO_BATCHES_SHOWN, choose_windows, draw_timelines

STAGES = 4


def timeline(num_micro_batches: int, seconds: float = 1.0) -> Timeline:
    schedule = OneForwardOneBackward(STAGES, num_micro_batches)
    passes = simulate(schedule, [seconds] * STAGES, [2 * seconds] * STAGES, [0.0] * (STAGES - 1))
    spans = [TimelineSpan(p.stage_id, Work(p.kind.value), p.start, p.stop, p.micro_batch) for p in passes]
    return Timeline("predicted", spans)


def count_pixels(file: Path, work: Work) -> int:
    color = [int(COLORS[work][i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return int((np.abs(image.imread(file)[..., :3] - color).max(axis=-1) < 0.02).sum())


def test_a_picture_with_all_colors(tmp_path: Path) -> None:
    file = tmp_path / "step.png"
    spans = [*timeline(6).spans, *(TimelineSpan(stage, Work.communication, 27.0, 28.0) for stage in range(STAGES))]
    spans += [TimelineSpan(stage, Work.optimizer, 28.0, 30.0) for stage in range(STAGES)]
    spans.append(TimelineSpan(0, Work.exchange, 0.0, 2.0))  # inside a pass: a strip upon it
    draw_timelines([Timeline("predicted", spans)], "pp4", file)
    pixels = {work: count_pixels(file, work) for work in Work}
    assert 1.5 < pixels[Work.backward] / pixels[Work.forward] < 2.5  # backward takes twice as long as forward
    assert 0 < pixels[Work.communication] < pixels[Work.optimizer] < pixels[Work.forward]
    assert 0 < pixels[Work.exchange] < pixels[Work.communication]


def test_two_steps_in_one_picture_have_one_scale(tmp_path: Path) -> None:
    fast, slow = timeline(6), timeline(6, seconds=2.0)
    assert choose_windows([fast, slow]) == [[(0.0, slow.end)]] * 2
    files = [tmp_path / "one.png", tmp_path / "two.png"]
    draw_timelines([slow], "pp4", files[0])
    draw_timelines([fast, slow], "pp4", files[1])
    one, two = (count_pixels(file, Work.forward) for file in files)
    assert two / one == pytest.approx(1.5, rel=0.15)


def test_a_long_step_is_shown_by_its_ends() -> None:
    short = timeline(2 * MICRO_BATCHES_SHOWN * STAGES)
    assert choose_windows([short]) == [[(0.0, short.end)]]
    long, longer = timeline(100), timeline(100, seconds=1.5)
    [(start, first), (last, stop)], [_, (_, other)] = choose_windows([long, longer])
    assert start == 0 < first < last < stop == long.end and other == longer.end and first == pytest.approx(stop - last)


def test_of_a_transfer_what_was_waited_for_is_idle() -> None:
    first = [
        Span("ForwardPass", 0, 1),
        Span("SendActivation", 1, 1.5),
        Span("RecvGrad", 1.5, 7),
        Span("BackwardPass", 7, 9),
    ]
    last = [
        Span("RecvActivation", 0, 1.5),
        Span("ForwardPass", 1.5, 2.5),
        Span("BackwardPass", 2.5, 6.5),
        Span("SendGrad", 6.5, 7),
        Span("Aligned", 7, 9),
        Span("OptimizerStep", 9, 10),
        Span("Exchange", 3, 4),
    ]
    measured = measured_timeline([first, last], OneForwardOneBackward(2, 1))
    crossing = [(span.stage_id, span.start, span.stop) for span in measured.spans if span.work is Work.communication]
    assert crossing == [(0, 1, 1.5), (0, 6.5, 7), (1, 1.0, 1.5), (1, 6.5, 7)]
    exchanged = [span for span in measured.spans if span.work is Work.exchange]
    assert exchanged == [TimelineSpan(1, Work.exchange, 3, 4)]
    assert measured.end == 10 and measured.bubble == pytest.approx(1 - 8 / 18)
