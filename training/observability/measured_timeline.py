"""A step as it was measured, as a timeline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from training.engine.engine import BACKWARD, FORWARD, OPTIMIZER, REDUCTIONS, TRANSFERS, WEIGHTS
from training.observability.stage_timer import EXCHANGE, Span
from training.pipeline.schedule import Schedule, Unit
from training.planner.timeline import Timeline, TimelineSpan, Work

_RECEIVES = ("RecvActivation", "RecvGrad")
_IS_BACK = {"RecvActivation": False, "SendActivation": False, "RecvGrad": True, "SendGrad": True}
Crossing = tuple[int, bool]  # the chunk in front of a boundary, and whether it is crossed back


def measured_timeline(spans_of_stage: Sequence[Sequence[Span]], schedule: Schedule) -> Timeline:
    """A measured step: the spans of one replica's stages [P], which ran `schedule`.

    Of a transfer only its end is drawn, as long as the quickest one across that boundary took; until then the stage
    waited.
    """
    told = [list(_tell_units(spans, schedule.list_units(stage_id))) for stage_id, spans in enumerate(spans_of_stage)]
    quickest: dict[Crossing, float] = {}
    for span, unit in (pair for pairs in told for pair in pairs):
        if span.name in TRANSFERS and unit is not None:
            crossing = _find_crossing(span, unit)
            quickest[crossing] = min(quickest.get(crossing, span.stop - span.start), span.stop - span.start)
    drawn: list[TimelineSpan] = []
    for stage_id, pairs in enumerate(told):
        drawn += _draw_spans(stage_id, pairs, quickest, schedule)
    return Timeline("measured", drawn)


def _tell_units(spans: Sequence[Span], units: Sequence[Unit]) -> Iterator[tuple[Span, Unit | None]]:
    """Each span with the unit that it is, or whose input or output it moves; None for what belongs to the whole
    step."""
    done = 0
    for span in spans:
        if span.name in (FORWARD, BACKWARD, WEIGHTS):
            done += 1
        if span.name in _RECEIVES:
            yield span, units[done]
        else:
            yield span, units[done - 1] if span.name in (FORWARD, BACKWARD, WEIGHTS, *TRANSFERS) else None


def _find_crossing(span: Span, unit: Unit) -> Crossing:
    before = span.name in ("RecvActivation", "SendGrad")
    return unit.chunk - before, _IS_BACK[span.name]


def _draw_spans(
    stage_id: int, pairs: Sequence[tuple[Span, Unit | None]], quickest: dict[Crossing, float], schedule: Schedule
) -> Iterator[TimelineSpan]:
    for span, unit in pairs:
        start, stop = span.start, span.stop
        if span.name in TRANSFERS and unit is not None:
            crossing = _find_crossing(span, unit)
            if schedule.find_stage(crossing[0]) != schedule.find_stage(crossing[0] + 1):  # else it is handed on
                yield TimelineSpan(stage_id, Work.communication, max(start, stop - quickest[crossing]), stop)
        elif unit is not None:
            yield TimelineSpan(stage_id, Work(unit.kind.value), start, stop, unit.micro_batch)
        elif span.name in REDUCTIONS:
            yield TimelineSpan(stage_id, Work.communication, start, stop)
        elif span.name == EXCHANGE:
            yield TimelineSpan(stage_id, Work.exchange, start, stop)
        elif span.name == OPTIMIZER:
            yield TimelineSpan(stage_id, Work.optimizer, start, stop)
