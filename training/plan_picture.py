"""The schedule of one step as a picture: a row a stage, forward and backward passes in their places, white where a stage waits.

A long step is shown by its beginning and its end, where the bubble is; the middle repeats.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure  # without pyplot: it takes twice as long to import, and no window is opened
from matplotlib.patches import Patch

from training.plan_schedule import Pass

FORWARD, BACKWARD = "#4c8eda", "#e0903c"
MICRO_BATCHES_SHOWN = 2  # times the stages, at each end
SMALLEST_NUMBERED = 0.015  # of the shown time: a narrower pass has no room for its number


def draw_schedule(passes: Sequence[Pass], title: str, file: Path) -> None:
    """Writes a PNG. passes: of one step, seconds from its start."""
    end = max(p.stop for p in passes)
    num_stages = 1 + max(p.stage_id for p in passes)
    windows = choose_windows(passes, num_stages)
    figure = Figure(figsize=(12, len(windows) * (1.3 + 0.32 * num_stages)), layout="tight")
    rows = figure.subplots(len(windows), 1, squeeze=False)
    for axes, (start, stop) in zip(rows[:, 0], windows, strict=True):
        _draw_window(axes, passes, num_stages, start, stop)
    idle = 1 - sum(p.stop - p.start for p in passes) / (num_stages * end)
    figure.suptitle(f"{title}: pipeline {end:.3g} s, waiting {idle:.1%}")
    handles = [Patch(color=FORWARD, label="forward"), Patch(color=BACKWARD, label="backward"), Patch(facecolor="white", edgecolor="gray", label="idle")]
    rows[0, 0].legend(handles=handles, loc="lower right", bbox_to_anchor=(1, 1), ncols=3, frameon=False)
    rows[-1, 0].set_xlabel("seconds from the start of the step")
    figure.savefig(file, dpi=110)


def choose_windows(passes: Sequence[Pass], num_stages: int) -> list[tuple[float, float]]:
    """The stretches of time to show: the whole step, or its two ends when it is long."""
    end = max(p.stop for p in passes)
    num_micro_batches = 1 + max(p.micro_batch for p in passes)
    shown = MICRO_BATCHES_SHOWN * num_stages
    if num_micro_batches <= 2 * shown:
        return [(0.0, end)]
    width = end * shown / num_micro_batches
    return [(0.0, width), (end - width, end)]


def _draw_window(axes: Axes, passes: Sequence[Pass], num_stages: int, start: float, stop: float) -> None:
    visible = [p for p in passes if p.stop > start and p.start < stop]
    for stage_id in range(num_stages):
        for is_forward, color in ((True, FORWARD), (False, BACKWARD)):
            spans = [(p.start, p.stop - p.start) for p in visible if p.stage_id == stage_id and p.is_forward is is_forward]
            axes.broken_barh(spans, (stage_id - 0.45, 0.9), facecolors=color, edgecolor="white", linewidth=0.5)
    for p in visible:
        if p.stop - p.start > SMALLEST_NUMBERED * (stop - start) and start <= p.start and p.stop <= stop:
            axes.text((p.start + p.stop) / 2, p.stage_id, str(p.micro_batch), ha="center", va="center", fontsize=7, color="white")
    axes.set(xlim=(start, stop), ylim=(num_stages - 0.5, -0.5), yticks=range(num_stages), ylabel="stage")
    axes.spines[["top", "right"]].set_visible(False)
