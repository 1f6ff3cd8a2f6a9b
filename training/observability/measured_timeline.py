"""A step as it was measured, as a timeline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from training.engine.engine import BACKWARD, FORWARD, OPTIMIZER, REDUCTIONS, TRANSFERS
from training.observability.stage_timer import Span
from training.pipeline.schedule import Schedule, Unit
from training.planner.timeline import Timeline, TimelineSpan, Work


def measured_timeline(spans_of_stage: Sequence[Sequence[Span]], schedule: Schedule) -> Timeline:
    """A measured step: the spans of one replica's stages [P], which ran `schedule`.

    Of a transfer only its end is drawn, as long as the quickest one across that boundary took; until then the stage
    waited.
    """
    leads_back = schedule.num_chunks > 1  # from the last stage to the first
    num_boundaries = schedule.num_stages if leads_back else schedule.num_stages - 1
    quickest = [_quickest(spans_of_stage, boundary) for boundary in range(num_boundaries)]
    drawn: list[TimelineSpan] = []
    for stage_id, spans in enumerate(spans_of_stage):
        drawn += _draw_spans(stage_id, spans, quickest, schedule.list_units(stage_id))
    return Timeline("measured", drawn)


def _quickest(spans_of_stage: Sequence[Sequence[Span]], boundary: int) -> dict[str, float]:
    """Seconds of the quickest transfer across a boundary, forward and backward, at whichever end, by the names of both
    ends.

    boundary: to the next stage; of the last stage, where a stage holds several chunks, to the first.
    """
    pure, beyond = {}, spans_of_stage[(boundary + 1) % len(spans_of_stage)]
    for before, after in (("SendActivation", "RecvActivation"), ("RecvGrad", "SendGrad")):
        at_ends = [span for span in spans_of_stage[boundary] if span.name == before] + [
            span for span in beyond if span.name == after
        ]
        pure[before] = pure[after] = min(span.stop - span.start for span in at_ends)
    return pure


def _draw_spans(
    stage_id: int, spans: Sequence[Span], quickest: Sequence[dict[str, float]], units: Sequence[Unit]
) -> Iterator[TimelineSpan]:
    following = iter(units)
    for span in spans:
        start, stop = span.start, span.stop
        if span.name in (FORWARD, BACKWARD):
            unit = next(following)
            yield TimelineSpan(stage_id, Work(unit.kind.value), start, stop, unit.micro_batch)
        elif span.name in TRANSFERS:
            boundary = stage_id - 1 if span.name in ("RecvActivation", "SendGrad") else stage_id
            yield TimelineSpan(stage_id, Work.communication, max(start, stop - quickest[boundary][span.name]), stop)
        elif span.name in REDUCTIONS:
            yield TimelineSpan(stage_id, Work.communication, start, stop)
        elif span.name == OPTIMIZER:
            yield TimelineSpan(stage_id, Work.optimizer, start, stop)
