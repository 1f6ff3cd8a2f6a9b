"""When each rank computes which micro-batch: one-forward-one-backward (PipeDream-Flush, 2006.09503) as DeepSpeed runs it, and interleaved
(2104.04473) as `training/engine/executor.py` does.

P stages (pipeline ranks), V chunks of layers a rank, M micro-batches. Chunk c of the P x V, in the order of the model, lies on rank c % P;
with one chunk a rank, 1F1B, a chunk is a stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple


class Unit(NamedTuple):
    """The forward or backward pass of one micro-batch through one chunk."""

    chunk: int
    micro_batch: int
    is_forward: bool


@dataclass(frozen=True)
class Pass:
    """A unit on its rank; seconds from the start of the step."""

    stage_id: int
    chunk: int
    micro_batch: int
    is_forward: bool
    start: float
    stop: float


def list_forward(stage_id: int, num_stages: int, num_micro_batches: int, num_chunks: int = 1) -> list[Unit]:
    """The forward passes of one rank in order: P micro-batches through its first chunk, the same through the next, ..., then the next P."""
    groups = [
        range(first, min(first + num_stages, num_micro_batches)) for first in range(0, num_micro_batches, num_stages)
    ]
    return [
        Unit(number * num_stages + stage_id, micro_batch, True)
        for group in groups
        for number in range(num_chunks)
        for micro_batch in group
    ]


def list_units(stage_id: int, num_stages: int, num_micro_batches: int, num_chunks: int = 1) -> list[Unit]:
    """All passes of one rank in order: some forward passes ahead, then one forward, one backward in turn, then the backward passes left.

    With several chunks M must be a multiple of P, or a rank may wait for what it would send itself.
    """
    forward = list_forward(stage_id, num_stages, num_micro_batches, num_chunks)
    last = num_stages * num_chunks - 1
    backward = [
        Unit(last - unit.chunk, unit.micro_batch, False)
        for unit in list_forward(num_stages - 1 - stage_id, num_stages, num_micro_batches, num_chunks)
    ]
    to_the_end = num_stages - 1 - stage_id
    ahead = to_the_end if num_chunks == 1 else 2 * to_the_end + (num_chunks - 1) * num_stages
    units = forward[:ahead]
    for number, unit in enumerate(backward):
        units += forward[ahead + number : ahead + number + 1]
        units.append(unit)
    return units


@cache
def list_in_flight(
    stage_id: int, num_stages: int, num_micro_batches: int, num_chunks: int = 1
) -> frozenset[tuple[int, ...]]:
    """How many micro-batches each chunk of a rank holds for its backward pass: all combinations [V] that a forward pass ends with."""
    held, found = [0] * num_chunks, set()
    for unit in list_units(stage_id, num_stages, num_micro_batches, num_chunks):
        held[unit.chunk // num_stages] += 1 if unit.is_forward else -1
        if unit.is_forward:
            found.add(tuple(held))
    return frozenset(found)


def simulate(
    forward: Sequence[float],
    backward: Sequence[float],
    transfer: Sequence[float],
    num_micro_batches: int,
    num_chunks: int = 1,
) -> list[Pass]:
    """The passes of one step, in the order in which they can start.

    forward, backward: seconds of a micro-batch through each chunk [P x V]. transfer: seconds from each chunk to the next, either way
    [P x V - 1]. num_chunks: V.
    """
    num_stages = len(forward) // num_chunks
    orders = [list_units(stage, num_stages, num_micro_batches, num_chunks) for stage in range(num_stages)]
    position, free = [0] * num_stages, [0.0] * num_stages
    stops: dict[Unit, float] = {}
    done: list[Pass] = []
    while len(done) < 2 * len(forward) * num_micro_batches:
        for stage, order in enumerate(orders):
            while position[stage] < len(order):
                unit = order[position[stage]]
                ready = _ready_at(unit, transfer, stops)
                if ready is None:
                    break
                start = max(ready, free[stage])
                free[stage] = stops[unit] = start + (forward if unit.is_forward else backward)[unit.chunk]
                done.append(Pass(stage, *unit, start, free[stage]))
                position[stage] += 1
    return done


def _ready_at(unit: Unit, transfer: Sequence[float], stops: dict[Unit, float]) -> float | None:
    """When the pass has its input; None while that is not known. A backward pass through the last chunk follows its own forward pass."""
    chunk, micro_batch, is_forward = unit
    if is_forward:
        if chunk == 0:
            return 0.0
        stop, boundary = stops.get(Unit(chunk - 1, micro_batch, True)), chunk - 1
    elif chunk == len(transfer):
        return stops.get(Unit(chunk, micro_batch, True))
    else:
        stop, boundary = stops.get(Unit(chunk + 1, micro_batch, False)), chunk
    return None if stop is None else stop + transfer[boundary]


def list_transfers(passes: Sequence[Pass], transfer: Sequence[float]) -> Iterator[tuple[int, float, float]]:
    """(stage, start, stop) of the transfers that a stage waits for: the part of its idle time before a pass in which the input is on its way.

    passes, transfer: as `simulate` returns and takes them.
    """
    free = dict.fromkeys((p.stage_id for p in passes), 0.0)
    for p in sorted(passes, key=lambda p: p.start):
        has_input = p.chunk > 0 if p.is_forward else p.chunk < len(transfer)
        start = (
            max(free[p.stage_id], p.start - transfer[p.chunk - 1 if p.is_forward else p.chunk])
            if has_input
            else p.start
        )
        if start < p.start:
            yield p.stage_id, start, p.start
        free[p.stage_id] = p.stop


def bubble_share(num_stages: int, num_micro_batches: int, num_chunks: int = 1) -> float:
    """(P - 1) / (V M + P - 1): the share of a step that a rank of an even pipeline waits (GPipe, 1811.06965; 2104.04473)."""
    return (num_stages - 1) / (num_chunks * num_micro_batches + num_stages - 1)
