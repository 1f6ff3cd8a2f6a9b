"""Simulates a schedule: when each pass starts and stops, for passes and transfers of given lengths. Pure.

P stages, V chunks of layers per stage, M micro-batches; see `training/pipeline/schedule.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from training.pipeline.schedule import Schedule, Unit, UnitKind


@dataclass(frozen=True)
class Pass:
    """A unit on its rank; seconds from the start of the step."""

    stage_id: int
    chunk: int
    micro_batch: int
    kind: UnitKind
    start: float
    stop: float


def simulate(
    schedule: Schedule,
    forward: Sequence[float],
    backward: Sequence[float],
    transfer: Sequence[float],
    weight_backward: Sequence[float] = (),
) -> list[Pass]:
    """Return the passes of one step, in the order in which they can start.

    forward, backward: seconds of a micro-batch through each chunk [P x V]. transfer: seconds from each chunk to the
    next, either way [P x V - 1]. weight_backward: those of `backward` that can be put off; for a schedule that does.
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
    """When the pass has its input; None while that is not known. A backward pass through the last chunk follows its own
    forward pass."""
    chunk, micro_batch, kind = unit
    if kind is UnitKind.weight_backward:
        return stops.get(unit._replace(kind=UnitKind.input_backward))
    if kind is UnitKind.forward:
        if chunk == 0:
            return 0.0
        stop, boundary = stops.get(Unit(chunk - 1, micro_batch, kind)), chunk - 1
    elif chunk == len(transfer):
        return stops.get(Unit(chunk, micro_batch, UnitKind.forward))
    else:
        stop, boundary = stops.get(Unit(chunk + 1, micro_batch, kind)), chunk
    return None if stop is None else stop + transfer[boundary]


def list_transfers(passes: Sequence[Pass], transfer: Sequence[float]) -> Iterator[tuple[int, float, float]]:
    """Yield (stage_id, start, stop) of the transfers that a stage waits for: the part of its idle time before a pass in
    which its input is being sent.

    passes, transfer: as `simulate` returns and takes them.
    """
    free = dict.fromkeys((p.stage_id for p in passes), 0.0)
    for p in sorted(passes, key=lambda p: p.start):
        boundary = p.chunk - 1 if p.kind is UnitKind.forward else p.chunk  # that the input crosses
        has_input = 0 <= boundary < len(transfer) and p.kind is not UnitKind.weight_backward
        start = max(free[p.stage_id], p.start - transfer[boundary]) if has_input else p.start
        if start < p.start:
            yield p.stage_id, start, p.start
        free[p.stage_id] = p.stop
