"""Measured and predicted times and memory: the times of all ranks combined into a line of metrics.jsonl, and a table
at the end.

P stages, M micro-batches. Definitions: docs/performance.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from console import measure_width, pluralize, stream
from formatting import render_rows, render_seconds
from training.costs.hardware import GIB
from training.distributed.topology import PIPE, Layout
from training.observability.first_step import FirstStep
from training.observability.measured_timeline import measured_timeline
from training.observability.metrics import Record
from training.observability.stage_timer import RankTimes, Span, StageTimer
from training.pipeline.schedules import build_schedule, find_schedule
from training.plan_command.timeline import predicted_timeline
from training.planner.prediction import Prediction


@dataclass(frozen=True)
class Measured:
    """The mean step. Seconds and bytes per stage [P]: the mean over its replicas, for memory the maximum.

    compute + communication + wait is the step. bubble: the mean share of the pipeline's time in which a stage runs no
    pass. imbalance: by how much the stage with the longest passes exceeds the mean. weight_grad_time: the part of
    compute_time spent on deferred weight gradients. exchange_time: the part of compute_time that layers waited for the
    ranks that share their sequences, or their experts.
    """

    num_steps: int
    step_time: float
    compute_time: list[float]
    communication_time: list[float]
    wait_time: list[float]
    bubble: float
    imbalance: float
    weight_grad_time: list[float]
    exchange_time: list[float]
    peak_memory: list[int]


def combine(ranks: Sequence[RankTimes], layout: Layout) -> Measured | None:
    """Combine the times of all ranks since they were last gathered; None when there was no step."""
    num_steps = ranks[0].num_steps
    if not num_steps:
        return None
    step = max(rank.step for rank in ranks)
    in_passes = [rank.forward + rank.backward + rank.weights for rank in ranks]
    passes = _by_stage(in_passes, layout)
    compute = _by_stage([busy + rank.optimizer for busy, rank in zip(in_passes, ranks, strict=True)], layout)
    communication = _by_stage(
        [rank.reduce + transfer for rank, transfer in zip(ranks, _transfers(ranks, layout), strict=True)], layout
    )
    pipeline = max(rank.pipeline for rank in ranks)
    mean_passes = sum(passes) / len(passes)
    peaks = [round(rank.peak_memory) for rank in ranks]
    return Measured(
        num_steps=round(num_steps),
        step_time=step / num_steps,
        compute_time=[seconds / num_steps for seconds in compute],
        communication_time=[seconds / num_steps for seconds in communication],
        wait_time=[
            max(0.0, step - busy - moving) / num_steps for busy, moving in zip(compute, communication, strict=True)
        ],
        bubble=1 - mean_passes / pipeline,
        imbalance=max(passes) / mean_passes - 1,
        exchange_time=[seconds / num_steps for seconds in _by_stage([rank.exchange for rank in ranks], layout)],
        weight_grad_time=[seconds / num_steps for seconds in _by_stage([rank.weights for rank in ranks], layout)],
        peak_memory=[max(peaks[rank] for rank in layout.list_stage_ranks(stage)) for stage in range(layout.num_stages)],
    )


def _by_stage(values: Sequence[float], layout: Layout) -> list[float]:
    """Return the mean over the replicas of each stage [P]. values: one per rank."""
    return [
        sum(values[rank] for rank in layout.list_stage_ranks(stage)) / layout.ranks_per_stage
        for stage in range(layout.num_stages)
    ]


def _transfers(ranks: Sequence[RankTimes], layout: Layout) -> list[float]:
    """Return the seconds of each rank's transfers without waiting.

    The rank that comes first to a transfer waits in it for the other; the rank that comes last does not wait. So the
    shorter time of the two ends of a boundary is that of the transfer. A rank that sends both ways in a pass (a
    V-shaped placement) is not compared: its own times count.
    """
    if find_schedule(layout.schedule).splits_backward:
        return [rank.send_activation + rank.recv_activation + rank.send_grad + rank.recv_grad for rank in ranks]
    seconds = [0.0] * len(ranks)
    for rank in (rank for rank in range(len(ranks)) if layout.stage_id(rank) < layout.num_stages - 1):
        after = layout.topology.neighbour(rank, PIPE)
        forward = min(ranks[rank].send_activation, ranks[after].recv_activation)
        backward = min(ranks[rank].recv_grad, ranks[after].send_grad)
        seconds[rank] += forward + backward
        seconds[after] += forward + backward
    return seconds


class Telemetry:
    """The measurement of a run's steps. The main rank reports the times of all ranks."""

    def __init__(self, timer: StageTimer, layout: Layout, prediction: Prediction | None) -> None:
        """prediction: on the main rank; None on the others."""
        self._timer, self._layout, self._prediction = timer, layout, prediction
        self._reported: list[tuple[Measured, Record]] = []
        self._first_step = FirstStep(prediction.plan, timer) if prediction is not None else None

    def start_step(self, profiled: bool) -> None:
        """profiled: whether the step will be drawn, for which all ranks start it together."""
        if profiled:
            dist.barrier()
        self._timer.start_step()
        if self._first_step is not None:
            self._first_step.start()

    def finish_step(self) -> list[Span]:
        spans = self._timer.finish_step()
        if self._first_step is not None:
            self._first_step.end()
            self._first_step = None
        return spans

    def gather(self) -> Measured | None:
        """Return the measurements since the last call; the same on all ranks. All ranks call it."""
        return combine(self._timer.gather(), self._layout)

    def draw(self, spans: list[Span], step: int, folder: Path) -> None:
        """Draw a step of the first replica, as predicted and as measured, into `folder`. All ranks call it."""
        gathered: list[list[Span]] = [[] for _ in range(self._layout.world_size)]
        dist.all_gather_object(gathered, spans)
        if self._prediction is None:
            return
        from training.plan_command.timeline_plot import (
            draw_timelines,  # matplotlib is slow to import, and few runs draw
        )

        first_replica = self._layout.topology.groups(PIPE)[0]
        measured = measured_timeline([gathered[rank] for rank in first_replica], build_schedule(self._layout))
        draw_timelines(
            [predicted_timeline(self._prediction.plan), measured],
            f"step {step}, {self._layout.describe()}",
            folder / f"step_{step}.png",
        )

    def describe(self, measured: Measured, tokens_per_second: float, step_time: float) -> Record:
        """Return the fields of a report. Main rank only. tokens_per_second, step_time: over the same steps, with what
        comes between two of them; tokens without padding."""
        prediction = self._prediction
        assert prediction is not None
        mfu = prediction.compute_mfu(tokens_per_second, step_time)
        record: Record = {
            **({} if mfu is None else {"mfu": mfu}),
            "compute_time": measured.compute_time,
            "communication_time": measured.communication_time,
            "wait_time": measured.wait_time,
            **({"exchange_time": measured.exchange_time} if any(measured.exchange_time) else {}),
            **({"weight_grad_time": measured.weight_grad_time} if any(measured.weight_grad_time) else {}),
            "bubble": measured.bubble,
            "predicted_bubble": prediction.plan.idle,
            "imbalance": measured.imbalance,
            "predicted_imbalance": prediction.plan.imbalance,
            "peak_memory": measured.peak_memory,
            "predicted_peak_memory": prediction.peak_memory,
        }
        self._reported.append((measured, {**record, "tokens_per_second": tokens_per_second}))
        return record

    def summarize(self) -> str:
        """Return a table of the run, without its first report if there are others: it is warm-up. Empty when nothing
        was reported."""
        if self._prediction is None or not self._reported:
            return ""
        return render_summary(self._reported[1:] or self._reported, self._prediction)


def render_summary(reported: Sequence[tuple[Measured, Record]], prediction: Prediction) -> str:
    """Return the table of a run. reported: the measurements and the record of each report."""
    plan = prediction.plan
    total = sum(measured.num_steps for measured, _ in reported)

    def mean(values: Sequence[float]) -> float:
        return sum(value * measured.num_steps for value, (measured, _) in zip(values, reported, strict=True)) / total

    def mean_over_time(key: str) -> float:
        """Return the mean of a figure in `PER_SECOND`."""
        return mean([record[key] * measured.step_time for measured, record in reported]) / step_time

    step_time = mean([measured.step_time for measured, _ in reported])
    rows = []
    for stage in plan.stages:
        s = stage.stage_id
        shares = (
            mean([getattr(m, kind)[s] for m, _ in reported]) / step_time
            for kind in ("compute_time", "communication_time", "wait_time")
        )
        peak = max(measured.peak_memory[s] for measured, _ in reported)
        rows.append(
            (
                str(s),
                stage.layers,
                *map("{:.1%}".format, shares),
                f"{peak / GIB:.2f}",
                f"{prediction.peak_memory[s] / GIB:.2f}",
            )
        )
    figures = [
        f"step {render_seconds(step_time)}",
        f"{mean_over_time('tokens_per_second'):,.0f} tokens/s",
    ]
    if prediction.is_known:
        figures[0] += f" (predicted {render_seconds(plan.step_seconds)})"
        figures.append(f"MFU {mean_over_time('mfu'):.1%} ({prediction.mfu:.1%})")
    figures.append(f"bubble {mean_over_time('bubble'):.1%} (predicted {plan.idle:.1%})")
    figures.append(f"imbalance {mean_over_time('imbalance'):.1%} ({plan.imbalance:.1%})")
    header = ("stage", "layers", "computing", "communicating", "waiting", "peak GiB", "predicted")
    return "\n".join(
        [
            f"measured over {pluralize(total, 'step')}:",
            *render_rows(header, rows, measure_width(stream())),
            ", ".join(figures),
        ]
    )
