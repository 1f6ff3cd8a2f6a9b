"""When each stage computes which micro-batch: one-forward-one-backward (PipeDream-Flush, 2006.09503) as DeepSpeed runs it.

P stages, M micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Pass:
    """A forward or backward pass of one micro-batch on one stage; seconds from the start of the step."""

    stage_id: int
    micro_batch: int
    is_forward: bool
    start: float
    stop: float


def list_passes(stage_id: int, num_stages: int, num_micro_batches: int) -> list[tuple[int, bool]]:
    """(micro-batch, is forward) in this stage's order: P - stage_id forward passes at most, then one backward, one forward in turn."""
    ahead = min(num_stages - stage_id, num_micro_batches)
    passes = [(micro_batch, True) for micro_batch in range(ahead)]
    for micro_batch in range(num_micro_batches):
        passes.append((micro_batch, False))
        if micro_batch + ahead < num_micro_batches:
            passes.append((micro_batch + ahead, True))
    return passes


def simulate(forward: Sequence[float], backward: Sequence[float], transfer: Sequence[float], num_micro_batches: int) -> list[Pass]:
    """The passes of one step, in the order in which they can start.

    forward, backward: seconds of a micro-batch on each stage [P]. transfer: seconds across each boundary [P - 1], either way.
    """
    num_stages = len(forward)
    orders = [list_passes(stage, num_stages, num_micro_batches) for stage in range(num_stages)]
    position, free = [0] * num_stages, [0.0] * num_stages
    stops: dict[tuple[int, int, bool], float] = {}
    done: list[Pass] = []
    while len(done) < 2 * num_stages * num_micro_batches:
        for stage, order in enumerate(orders):
            while position[stage] < len(order):
                micro_batch, is_forward = order[position[stage]]
                ready = _ready_at(stage, micro_batch, is_forward, num_stages, transfer, stops)
                if ready is None:
                    break
                start = max(ready, free[stage])
                free[stage] = stops[stage, micro_batch, is_forward] = start + (forward if is_forward else backward)[stage]
                done.append(Pass(stage, micro_batch, is_forward, start, free[stage]))
                position[stage] += 1
    return done


def _ready_at(
    stage: int, micro_batch: int, is_forward: bool, num_stages: int, transfer: Sequence[float], stops: dict[tuple[int, int, bool], float]
) -> float | None:
    """When the pass has its input; None while that is not known. A backward pass on the last stage follows its own forward pass."""
    if is_forward:
        if stage == 0:
            return 0.0
        stop, boundary = stops.get((stage - 1, micro_batch, True)), stage - 1
    elif stage == num_stages - 1:
        return stops.get((stage, micro_batch, True))
    else:
        stop, boundary = stops.get((stage + 1, micro_batch, False)), stage
    return None if stop is None else stop + transfer[boundary]


def list_transfers(passes: Sequence[Pass], transfer: Sequence[float]) -> Iterator[tuple[int, float, float]]:
    """(stage, start, stop) of the transfers that a stage waits for: the part of its idle time before a pass in which the input is on its way.

    passes, transfer: as `simulate` returns and takes them.
    """
    num_stages = len(transfer) + 1
    free = [0.0] * num_stages
    for p in sorted(passes, key=lambda p: p.start):
        has_input = p.stage_id > 0 if p.is_forward else p.stage_id < num_stages - 1
        start = max(free[p.stage_id], p.start - transfer[p.stage_id - 1 if p.is_forward else p.stage_id]) if has_input else p.start
        if start < p.start:
            yield p.stage_id, start, p.start
        free[p.stage_id] = p.stop


def bubble_share(num_stages: int, num_micro_batches: int) -> float:
    """(P - 1) / (M + P - 1): the share of a step that a stage of an even pipeline waits (GPipe, 1811.06965)."""
    return (num_stages - 1) / (num_micro_batches + num_stages - 1)
