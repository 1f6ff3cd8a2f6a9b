"""Layers are split over stages by the time of their passes, and by whether a stage has the memory for them.

The times of passes order a schedule too. All are sums over the cost terms (`table.py`), rounded to nanoseconds here:
ranks that ordered their passes by other numbers would wait for each other forever, so the main rank sends its own to
all.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from training.cost_terms.cost_term import Chunk, PlannedRun, Stage, list_stages
from training.cost_terms.table import sum_memory, sum_pass_cost
from training.costs.cost import LayerCost
from training.distributed.topology import Layout
from training.pipeline.partition import FindStop
from training.pipeline.schedule import PassTimes


def time_layers(costs: Sequence[LayerCost], run: PlannedRun) -> list[int]:
    """Return the nanoseconds of both passes through each layer alone, by which layers are balanced over stages."""
    last = len(costs) - 1

    @cache  # layers that cost the same, between the first and the last, take as long
    def time_layer(cost: LayerCost, index: int) -> int:
        chunk = Chunk(run, 0, index, range(index, index + 1), [cost], has_loss=index == last)
        return round(sum(_time(chunk)))

    return [time_layer(cost, min(index, 1) if index < last else last) for index, cost in enumerate(costs)]


def set_times(layout: Layout, costs: Sequence[LayerCost], bounds: Sequence[int], run: PlannedRun) -> Layout:
    """Return the layout with the times of its chunks, `bounds`, by which its passes and exchanges are ordered."""
    chunks = [chunk for stage in list_stages(run, costs, bounds) for chunk in stage.chunks]
    return replace(layout, pass_times=tuple(_time(chunk) for chunk in sorted(chunks, key=lambda chunk: chunk.number)))


def _time(chunk: Chunk) -> PassTimes:
    cost, trains = sum_pass_cost(chunk), not chunk.run.config.evaluate_only
    backward, deferred = trains * cost.backward_seconds, trains * cost.deferred_seconds
    return PassTimes(*(round(1e9 * seconds) for seconds in (cost.forward_seconds, backward - deferred, deferred)))


def build_find_stop(costs: Sequence[LayerCost], run: PlannedRun) -> FindStop:
    """Return the function that says which layers of a stage fit a GPU. costs: of all layers, for one micro-batch.

    A range of layers that fits does so without its last ones, so a stage's longest range is found by doubling and then
    halving, where it is not as long as the one found before. A stage of so many layers that cost the same is counted
    once, wherever it starts.
    """
    last_stage = run.layout.num_stages - 1
    known: dict[tuple[Any, ...], bool] = {}

    def holds(stage_id: int, start: int, stop: int) -> bool:
        held = (stage_id, *costs[start:stop])
        if held not in known:
            memory = sum_memory(Stage(run, stage_id, costs, [range(start, stop)]))
            known[held] = memory.peak <= run.hardware.usable_bytes
        return known[held]

    lengths: dict[int, int] = {}  # by stage, of the range that was found last

    @cache
    def find_stop(stage_id: int, start: int) -> int:
        """The end of the longest range that fits; `start` where none does."""
        high = len(costs) - (last_stage - stage_id)  # a layer or more for each later stage
        if stage_id == last_stage:  # whose loss is that of the head, so that fewer layers are no such stage
            return high if holds(stage_id, start, high) else start
        # Under 1F1B a later stage has fewer micro-batches in flight; the first has a layer of its own
        low = find_stop(stage_id - 1, start) if stage_id > 1 else start
        as_long = start + lengths.get(stage_id, 0)  # as most ranges are, of layers of one kind
        for stop in (as_long, as_long + 1):
            if low < stop <= high:
                low, high = (stop, high) if holds(stage_id, start, stop) else (low, stop - 1)
        step = 1
        while low + step <= high and holds(stage_id, start, low + step):  # from short ranges on, which count fastest
            low, step = low + step, 2 * step
        stops = range(low + 1, min(low + step, high + 1))
        found = low + bisect_left(stops, True, key=lambda stop: not holds(stage_id, start, stop))
        lengths[stage_id] = found - start
        return found

    return find_stop
