"""One step as spans of time, stage by stage: as the plan foresees it, or as it was measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from training.plan import Plan
from training.plan_schedule import list_transfers
from training.stage_clock import BACKWARD, FORWARD, OPTIMIZER, REDUCTIONS, TRANSFERS, Lap


class Work(Enum):
    forward = "forward"
    backward = "backward"
    communication = "communication"
    optimizer = "optimizer step"


@dataclass(frozen=True)
class Span:
    """Seconds from the start of the step. micro_batch: of a pass."""

    stage_id: int
    work: Work
    start: float
    stop: float
    micro_batch: int | None = None


@dataclass(frozen=True)
class Timeline:
    """Where there is no span a stage is idle."""

    label: str
    spans: list[Span]

    @property
    def passes(self) -> list[Span]:
        return [span for span in self.spans if span.micro_batch is not None]

    @property
    def num_stages(self) -> int:
        return 1 + max(span.stage_id for span in self.spans)

    @property
    def num_micro_batches(self) -> int:
        return 1 + max(span.micro_batch for span in self.spans if span.micro_batch is not None)

    @property
    def end(self) -> float:
        return max(span.stop for span in self.spans)

    @property
    def bubble(self) -> float:
        """The share of the pipeline's time, up to the last pass, in which a stage runs no pass, on average."""
        pipeline = max(span.stop for span in self.passes)
        return 1 - sum(span.stop - span.start for span in self.passes) / (self.num_stages * pipeline)


def foresee(plan: Plan) -> Timeline:
    """The plan's step."""
    spans = [Span(p.stage_id, Work.forward if p.is_forward else Work.backward, p.start, p.stop, p.micro_batch) for p in plan.passes]
    spans += [Span(stage_id, Work.communication, start, stop) for stage_id, start, stop in list_transfers(plan.passes, plan.transfer_seconds)]
    reduced = plan.pipeline_seconds + plan.reduce_seconds
    for stage in plan.stages:
        spans.append(Span(stage.stage_id, Work.communication, plan.pipeline_seconds, reduced))
        spans.append(Span(stage.stage_id, Work.optimizer, reduced, plan.step_seconds))
    return Timeline("predicted", [span for span in spans if span.stop > span.start])


def arrange(laps_of_stage: Sequence[Sequence[Lap]]) -> Timeline:
    """A measured step: the laps of one replica's stages [P].

    Of a transfer only its end is drawn, as long as the quickest one across that boundary took; until then the stage waited.
    """
    quickest = [_quickest(laps_of_stage, boundary) for boundary in range(len(laps_of_stage) - 1)]
    spans: list[Span] = []
    for stage_id, laps in enumerate(laps_of_stage):
        spans += _spans(stage_id, laps, quickest)
    return Timeline("measured", spans)


def _quickest(laps_of_stage: Sequence[Sequence[Lap]], boundary: int) -> dict[str, float]:
    """Seconds of the quickest transfer across a boundary, forward and backward, at whichever end, by the names of both ends."""
    pure = {}
    for before, after in (("SendActivation", "RecvActivation"), ("RecvGrad", "SendGrad")):
        at_ends = [lap for lap in laps_of_stage[boundary] if lap.name == before] + [lap for lap in laps_of_stage[boundary + 1] if lap.name == after]
        pure[before] = pure[after] = min(lap.stop - lap.start for lap in at_ends)
    return pure


def _spans(stage_id: int, laps: Sequence[Lap], quickest: Sequence[dict[str, float]]) -> Iterator[Span]:
    passed = {FORWARD: 0, BACKWARD: 0}
    for lap in laps:
        if lap.name in passed:
            yield Span(stage_id, Work.forward if lap.name == FORWARD else Work.backward, lap.start, lap.stop, passed[lap.name])
            passed[lap.name] += 1
        elif lap.name in TRANSFERS:
            boundary = stage_id - 1 if lap.name in ("RecvActivation", "SendGrad") else stage_id
            yield Span(stage_id, Work.communication, max(lap.start, lap.stop - quickest[boundary][lap.name]), lap.stop)
        elif lap.name in REDUCTIONS:
            yield Span(stage_id, Work.communication, lap.start, lap.stop)
        elif lap.name == OPTIMIZER:
            yield Span(stage_id, Work.optimizer, lap.start, lap.stop)
