"""Whether a stage has the memory for a range of layers: the constraint of an uneven split."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from training.cost_terms import table
from training.cost_terms.cost_term import PlannedRun, Stage
from training.costs.cost import LayerCost
from training.pipeline.partition import Fits


def build_fits(costs: Sequence[LayerCost], run: PlannedRun) -> Fits:
    """Return the function that says whether a stage fits a GPU. costs: of all layers, for one micro-batch.

    Layers of one kind share one cost (`count_layers`), so a stage of so many of them is counted once, wherever it
    starts; and a stage that begins with layers which exceed the memory already is not counted.
    """
    kinds = [id(cost) for cost in costs]
    known: dict[tuple[int, ...], bool] = {}
    too_many: dict[tuple[int, int], int] = {}  # (stage_id, start) -> the least stop that does not fit

    @cache
    def fits(stage_id: int, start: int, stop: int) -> bool:
        if stop >= too_many.get((stage_id, start), stop + 1):
            return False
        held = (stage_id, *kinds[start:stop])
        if held not in known:
            memory = table.sum_memory(Stage(run, stage_id, costs, [range(start, stop)]))
            known[held] = memory.peak <= run.hardware.usable_bytes
        if not known[held]:
            too_many[stage_id, start] = stop
        return known[held]

    return fits
