"""The timeline of a measured step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from training.engine.engine import BACKWARD, FORWARD, OPTIMIZER, REDUCTIONS, TRANSFERS, WEIGHTS
from training.observability.stage_timer import EXCHANGE, Span
from training.pipeline.schedule import Schedule, Unit
from training.plan_command.timeline import Timeline, TimelineSpan, Work

_PASSES = (FORWARD, BACKWARD, WEIGHTS)
_RECEIVES = ("RecvActivation", "RecvGrad")
_IS_BACK = {"RecvActivation": False, "SendActivation": False, "RecvGrad": True, "SendGrad": True}
Crossing = tuple[int, bool]  # the chunk before a boundary, and whether it is crossed in the backward pass


def measured_timeline(spans_of_stage: Sequence[Sequence[Span]], schedule: Schedule) -> Timeline:
    """Return the timeline of a measured step. spans_of_stage: of one replica [P], which ran `schedule`.

    A transfer is drawn at the end of its span, with the duration of the fastest one across that boundary: the stage
    waited for the rest of the span.
    """
    matched = [list(_match_units(spans, schedule, stage_id)) for stage_id, spans in enumerate(spans_of_stage)]
    fastest: dict[Crossing, float] = {}
    for span, unit in (pair for pairs in matched for pair in pairs):
        if span.name in TRANSFERS and unit is not None:
            crossing = _find_crossing(span, unit)
            fastest[crossing] = min(fastest.get(crossing, span.stop - span.start), span.stop - span.start)
    drawn: list[TimelineSpan] = []
    for stage_id, pairs in enumerate(matched):
        drawn += _draw_spans(stage_id, pairs, fastest, schedule)
    return Timeline("measured", drawn)


def _match_units(spans: Sequence[Span], schedule: Schedule, stage_id: int) -> Iterator[tuple[Span, Unit | None]]:
    """Yield each span with its unit, or the unit whose input or output it moves; None for spans of the whole step."""
    done, units = 0, schedule.list_units(stage_id)
    if sum(span.name in _PASSES for span in spans) > len(units):
        units = schedule.list_forward(stage_id) + units  # the pass before the step
    for span in spans:
        if span.name in _PASSES:
            done += 1
        if span.name in _RECEIVES:
            yield span, units[done]
        else:
            yield span, units[done - 1] if span.name in (*_PASSES, *TRANSFERS) else None


def _find_crossing(span: Span, unit: Unit) -> Crossing:
    before = span.name in ("RecvActivation", "SendGrad")
    return unit.chunk - before, _IS_BACK[span.name]


def _draw_spans(
    stage_id: int, pairs: Sequence[tuple[Span, Unit | None]], fastest: dict[Crossing, float], schedule: Schedule
) -> Iterator[TimelineSpan]:
    for span, unit in pairs:
        start, stop = span.start, span.stop
        if span.name in TRANSFERS and unit is not None:
            crossing = _find_crossing(span, unit)
            if schedule.find_stage(crossing[0]) != schedule.find_stage(
                crossing[0] + 1
            ):  # else the chunks are on one stage
                yield TimelineSpan(stage_id, Work.communication, max(start, stop - fastest[crossing]), stop)
        elif unit is not None:
            yield TimelineSpan(stage_id, Work(unit.kind.value), start, stop, unit.micro_batch)
        elif span.name in REDUCTIONS:
            yield TimelineSpan(stage_id, Work.communication, start, stop)
        elif span.name == EXCHANGE:
            yield TimelineSpan(stage_id, Work.exchange, start, stop)
        elif span.name == OPTIMIZER:
            yield TimelineSpan(stage_id, Work.optimizer, start, stop)
