"""Simulates one step of a pipeline schedule: computes when each pass starts and stops, from the duration of each pass
and of each transfer between stages. Pure functions; the durations come from the caller (`training/planner/plan.py`).

A stage runs its passes one after the other, in the order of the schedule. A pass starts when its stage is free and its
input has arrived. A transfer delays only the pass that needs the input: the stage that sends continues with its next
pass at once, and transfers do not slow each other down.

P stages, V chunks of layers per stage, M micro-batches. Chunks are numbered from 0 to P x V - 1 in the order of the
model (`training/pipeline/schedule.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from training.pipeline.schedule import Schedule, Unit, UnitKind


@dataclass(frozen=True)
class Pass:
    """One pass of one micro-batch through one chunk, with its time in the simulated step."""

    stage_id: int  # the stage that runs the pass, from 0
    chunk: int  # from 0, in the order of the model
    micro_batch: int  # from 0
    kind: UnitKind
    start: float  # seconds from the start of the step
    stop: float  # seconds from the start of the step


def simulate(
    schedule: Schedule,
    forward: Sequence[float],
    backward: Sequence[float],
    transfer: Sequence[float],
    weight_backward: Sequence[float] = (),
) -> list[Pass]:
    """Return all passes of one step. Each pass comes after the passes that it depends on; the list is not sorted by
    time.

    forward: seconds of the forward pass of one micro-batch through each chunk, [P x V]. backward: the same for the
    whole backward pass, [P x V]. transfer: seconds that a micro-batch takes from each chunk to the next one, or back,
    [P x V - 1]. weight_backward: the seconds of `backward` that compute the gradients of weights, [P x V]; only for a
    schedule that defers them (`Schedule.splits_backward`), empty for others.

    An AssertionError means that the schedule has a deadlock: every stage waits for another one.
    """
    seconds = {UnitKind.forward: forward, UnitKind.backward: backward, UnitKind.weight_backward: weight_backward}
    seconds[UnitKind.input_backward] = [b - w for b, w in zip(backward, weight_backward)]
    orders = [schedule.list_units(stage_id) for stage_id in range(schedule.num_stages)]
    position, free = [0] * len(orders), [0.0] * len(orders)
    stops: dict[Unit, float] = {}
    done: list[Pass] = []
    total = sum(map(len, orders))
    while len(done) < total:
        done_before = len(done)
        for stage_id, order in enumerate(orders):
            while position[stage_id] < len(order):
                unit = order[position[stage_id]]
                ready = _ready_at(unit, transfer, stops)
                if ready is None:
                    break
                start = max(ready, free[stage_id])
                free[stage_id] = stops[unit] = start + seconds[unit.kind][unit.chunk]
                done.append(Pass(stage_id, *unit, start, free[stage_id]))
                position[stage_id] += 1
        assert len(done) > done_before, f"all stages of {schedule} wait for each other"
    return done


def _ready_at(unit: Unit, transfer: Sequence[float], stops: Mapping[Unit, float]) -> float | None:
    """Return the time at which the input of a pass has arrived, in seconds from the start of the step; None if the pass
    that makes the input is not simulated yet.

    The first chunk has its inputs from the start. A backward pass through the last chunk starts from the forward pass
    through the same chunk, and the gradients of weights follow the gradient of the input; neither needs a transfer.
    transfer: as in `simulate`. stops: when each pass that is already simulated stops.
    """
    if unit.kind is UnitKind.weight_backward:
        return stops.get(unit._replace(kind=UnitKind.input_backward))
    maker = unit.chunk + (-1 if unit.kind is UnitKind.forward else 1)  # the chunk whose pass makes the input
    if maker < 0:
        return 0.0
    if maker > len(transfer):
        return stops.get(unit._replace(kind=UnitKind.forward))
    stop = stops.get(unit._replace(chunk=maker))
    return None if stop is None else stop + transfer[min(maker, unit.chunk)]


def list_transfers(passes: Sequence[Pass], transfer: Sequence[float]) -> Iterator[tuple[int, float, float]]:
    """Yield (stage_id, start, stop) of each time that a stage waits for a transfer, in seconds from the start of the
    step: the part of its idle time before a pass in which the input of that pass is being sent. A transfer that ends
    while the stage is still busy is not listed.

    passes: as `simulate` returns them. transfer: as `simulate` takes it.
    """
    free = dict.fromkeys((p.stage_id for p in passes), 0.0)  # when the last pass of each stage so far has stopped
    for p in sorted(passes, key=lambda p: p.start):
        boundary = p.chunk - 1 if p.kind is UnitKind.forward else p.chunk  # the one that the input crosses
        has_input = 0 <= boundary < len(transfer) and p.kind is not UnitKind.weight_backward
        start = max(free[p.stage_id], p.start - transfer[boundary]) if has_input else p.start
        if start < p.start:
            yield p.stage_id, start, p.start
        free[p.stage_id] = p.stop
