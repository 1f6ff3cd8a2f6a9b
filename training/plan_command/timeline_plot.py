"""Draws steps: one row per stage with its forward and backward passes and communication, white where it waits.

A long step is shown by its beginning and its end, where the bubble is; the middle repeats. Steps in one picture have
one scale.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure  # without pyplot: it takes twice as long to import, and no window is opened
from matplotlib.patches import Patch

from formatting import render_seconds
from training.plan_command.timeline import Timeline, Work

COLORS = {
    Work.forward: "#4c8eda",
    Work.backward: "#e0903c",
    Work.input_backward: "#e0903c",
    Work.weight_backward: "#c65d57",
    Work.communication: "#4f9d69",
    Work.optimizer: "#8d83b8",
    Work.exchange: "#2f6b45",
}
LABELS = {Work.input_backward: "backward, of inputs", Work.weight_backward: "backward, of weights"}
PLACE, STRIP = (-0.45, 0.9), (0.27, 0.18)  # of a bar in its row, and of what is drawn upon it: top and height
MICRO_BATCHES_SHOWN = 2  # times the stages, at each end
_NUMBER: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 7.5, "color": "white"}
DIGIT = 0.008  # of the shown time: a narrower pass has no room for a digit of its number


def draw_timelines(timelines: Sequence[Timeline], title: str, file: Path) -> None:
    """Write a PNG to `file`. timelines: of the same stages and micro-batches, drawn one below the other."""
    windows = choose_windows(timelines)
    num_stages = timelines[0].num_stages
    shown = [(timeline, window) for timeline, its in zip(timelines, windows, strict=True) for window in its]
    figure = Figure(figsize=(10, 0.5 + len(shown) * (0.9 + 0.32 * num_stages)), layout="constrained")
    rows = figure.subplots(len(shown), 1, squeeze=False)[:, 0]
    for axes, (timeline, window) in zip(rows, shown, strict=True):
        _draw_window(axes, timeline, *window)
        if window[0] == 0:
            step = f"step {render_seconds(timeline.end)}, bubble {timeline.bubble:.1%}"
            axes.set_title(f"{timeline.label}: {step}", loc="left", fontsize=10)
    figure.suptitle(title)
    drawn = {span.work for timeline in timelines for span in timeline.spans}
    handles = [Patch(color=COLORS[work], label=LABELS.get(work, work.value)) for work in COLORS if work in drawn]
    handles.append(Patch(facecolor="white", edgecolor="gray", label="idle"))
    figure.legend(handles=handles, loc="outside lower right", ncols=len(handles), frameon=False)
    rows[-1].set_xlabel("seconds from the start of the step", loc="left")
    figure.savefig(file, dpi=140)


def choose_windows(timelines: Sequence[Timeline]) -> list[list[tuple[float, float]]]:
    """Return the windows (start, stop) to show of each timeline: the whole step, or its two ends when it is long."""
    end = max(timeline.end for timeline in timelines)
    shown = MICRO_BATCHES_SHOWN * timelines[0].num_stages
    if timelines[0].num_micro_batches <= 2 * shown:
        return [[(0.0, end)] for _ in timelines]
    width = end * shown / timelines[0].num_micro_batches
    return [[(0.0, width), (max(timeline.end, width) - width, max(timeline.end, width))] for timeline in timelines]


def _draw_window(axes: Axes, timeline: Timeline, start: float, stop: float) -> None:
    visible = [span for span in timeline.spans if span.stop > start and span.start < stop]
    for stage_id, work in itertools.product(range(timeline.num_stages), COLORS):
        spans = [span for span in visible if span.stage_id == stage_id and span.work is work]
        (top, height), edge = (STRIP, 0) if work is Work.exchange else (PLACE, 0.5)
        bars = [(span.start, span.stop - span.start) for span in spans]
        place = stage_id + top, height
        axes.broken_barh(bars, place, facecolors=COLORS[work], edgecolor="white", linewidth=edge)
    for span in visible:
        number = "" if span.micro_batch is None else str(span.micro_batch)
        if span.stop - span.start > DIGIT * len(number) * (stop - start) and start <= span.start and span.stop <= stop:
            axes.text((span.start + span.stop) / 2, span.stage_id, number, **_NUMBER)
    stages = range(timeline.num_stages)
    axes.set(xlim=(start, stop), ylim=(len(stages) - 0.5, -0.5), yticks=stages, ylabel="stage")
    axes.spines[["top", "right"]].set_visible(False)
