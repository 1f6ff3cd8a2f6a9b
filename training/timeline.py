"""One step as spans of time, stage by stage: as the plan foresees it, or as it was measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from training.plan import Plan
from training.plan_schedule import Unit, list_transfers, list_units
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


def arrange(laps_of_stage: Sequence[Sequence[Lap]], num_chunks: int = 1) -> Timeline:
    """A measured step: the laps of one replica's stages [P]. num_chunks: of each.

    Of a transfer only its end is drawn, as long as the quickest one across that boundary took; until then the stage waited.
    """
    num_stages = len(laps_of_stage)
    quickest = [_quickest(laps_of_stage, boundary) for boundary in range(num_stages if num_chunks > 1 else num_stages - 1)]
    num_micro_batches = sum(lap.name == FORWARD for lap in laps_of_stage[0]) // num_chunks
    spans: list[Span] = []
    for stage_id, laps in enumerate(laps_of_stage):
        spans += _spans(stage_id, laps, quickest, list_units(stage_id, num_stages, num_micro_batches, num_chunks))
    return Timeline("measured", spans)


def _quickest(laps_of_stage: Sequence[Sequence[Lap]], boundary: int) -> dict[str, float]:
    """Seconds of the quickest transfer across a boundary, forward and backward, at whichever end, by the names of both ends.

    boundary: to the next stage; of the last stage, where a stage holds several chunks, to the first.
    """
    pure, beyond = {}, laps_of_stage[(boundary + 1) % len(laps_of_stage)]
    for before, after in (("SendActivation", "RecvActivation"), ("RecvGrad", "SendGrad")):
        at_ends = [lap for lap in laps_of_stage[boundary] if lap.name == before] + [lap for lap in beyond if lap.name == after]
        pure[before] = pure[after] = min(lap.stop - lap.start for lap in at_ends)
    return pure


def _spans(stage_id: int, laps: Sequence[Lap], quickest: Sequence[dict[str, float]], units: Sequence[Unit]) -> Iterator[Span]:
    following = iter(units)
    for lap in laps:
        if lap.name in (FORWARD, BACKWARD):
            yield Span(stage_id, Work.forward if lap.name == FORWARD else Work.backward, lap.start, lap.stop, next(following).micro_batch)
        elif lap.name in TRANSFERS:
            boundary = stage_id - 1 if lap.name in ("RecvActivation", "SendGrad") else stage_id
            yield Span(stage_id, Work.communication, max(lap.start, lap.stop - quickest[boundary][lap.name]), lap.stop)
        elif lap.name in REDUCTIONS:
            yield Span(stage_id, Work.communication, lap.start, lap.stop)
        elif lap.name == OPTIMIZER:
            yield Span(stage_id, Work.optimizer, lap.start, lap.stop)
