"""One step as spans of time, stage by stage: as the plan predicts it, or as it was measured."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from training.costs.simulation import list_transfers
from training.planner.plan import Plan


class Work(Enum):
    """The passes have the names of `training.pipeline.schedule.UnitKind`. exchange: with the ranks that share a
    sequence; of a measured step."""

    forward = "forward"
    backward = "backward"
    input_backward = "input_backward"
    weight_backward = "weight_backward"
    communication = "communication"
    exchange = "exchange inside a pass"
    optimizer = "optimizer step"


@dataclass(frozen=True)
class TimelineSpan:
    """Seconds from the start of the step. micro_batch: of a pass."""

    stage_id: int
    work: Work
    start: float
    stop: float
    micro_batch: int | None = None


@dataclass(frozen=True)
class Timeline:
    """The spans of one step, in seconds. A stage is idle where it has no span."""

    label: str
    spans: list[TimelineSpan]

    @property
    def passes(self) -> list[TimelineSpan]:
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


def predicted_timeline(plan: Plan) -> Timeline:
    """Return the step that the plan predicts as a timeline."""
    spans = [TimelineSpan(p.stage_id, Work(p.kind.value), p.start, p.stop, p.micro_batch) for p in plan.passes]
    spans += [
        TimelineSpan(stage_id, Work.communication, start, stop)
        for stage_id, start, stop in list_transfers(plan.passes, plan.transfer_seconds)
    ]
    reduced = plan.pipeline_seconds + plan.reduce_seconds
    for stage in plan.stages:
        spans.append(TimelineSpan(stage.stage_id, Work.communication, plan.pipeline_seconds, reduced))
        spans.append(TimelineSpan(stage.stage_id, Work.optimizer, reduced, plan.step_seconds))
    return Timeline("predicted", [span for span in spans if span.stop > span.start])
