"""The time of a pass: what layers are distributed by, schedules are ordered by, and a step is simulated with.

All three are the sum over the cost terms (`table.py`). For the first two it is rounded to nanoseconds: ranks that
ordered their passes by other numbers would wait for each other forever, so the main rank sends its own to all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from training.cost_terms.cost_term import Chunk, PlannedRun, list_stages
from training.cost_terms.table import sum_pass_cost
from training.costs.cost import LayerCost
from training.costs.time import compute_sending_seconds
from training.distributed.topology import Layout
from training.pipeline.schedule import PassTimes


class PassSeconds(NamedTuple):
    """The seconds of one micro-batch through a chunk of layers, with all that its passes wait for."""

    forward: float
    backward: float  # with what is recomputed
    deferred: float  # those of `backward` that a schedule can put off
    sending: float  # those of both passes in which ranks that share layers, sequences or experts send


def time_passes(chunk: Chunk) -> PassSeconds:
    """Return the time of a chunk's passes."""
    cost, run = sum_pass_cost(chunk), chunk.run
    forward, backward = (
        compute_sending_seconds(sent, run.layout, chunk.stage_id, run.hardware)
        for sent in (cost.forward_sent, cost.backward_sent)
    )
    return PassSeconds(
        cost.forward_seconds + forward, cost.backward_seconds + backward, cost.deferred_seconds, forward + backward
    )


def time_layers(costs: Sequence[LayerCost], run: PlannedRun) -> list[int]:
    """Return the nanoseconds of both passes through each layer alone, by which layers are balanced over stages."""
    last = len(costs) - 1
    chunks = [
        Chunk(run, 0, index, range(index, index + 1), [cost], has_first_layer=index == 0, has_loss=index == last)
        for index, cost in enumerate(costs)
    ]
    times = {kind: round(sum(_round(chunk))) for kind, chunk in {chunk.kind: chunk for chunk in chunks}.items()}
    return [times[chunk.kind] for chunk in chunks]


def set_times(layout: Layout, costs: Sequence[LayerCost], bounds: Sequence[int], run: PlannedRun) -> Layout:
    """Return the layout with the times of its chunks, `bounds`, by which its passes and exchanges are ordered."""
    chunks = [chunk for stage in list_stages(run, costs, bounds) for chunk in stage.chunks]
    return replace(layout, pass_times=tuple(_round(chunk) for chunk in sorted(chunks, key=lambda chunk: chunk.number)))


def _round(chunk: Chunk) -> PassTimes:
    forward, backward, deferred, _ = time_passes(chunk)
    if chunk.run.config.evaluate_only:
        backward = deferred = 0.0
    return PassTimes(*(round(1e9 * seconds) for seconds in (forward, backward - deferred, deferred)))
