"""Which stage gets which layers: pure functions of the list of layers.

A split is given by its bounds, P x V + 1 layer indices of V chunks per stage: chunk c is layers bounds[c] to bounds[c +
1]; a schedule says on which stage it is (`Schedule.find_stage`). With one chunk per stage, chunk s is stage s.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, combinations, pairwise
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from errors import UserError
from models.architecture.alike import map_alike
from models.experts.sizes import active_share, list_matrices
from models.layers.layer import Layer
from training.pipeline.schedule import Schedule

Fits = Callable[[int, int, int], bool]  # whether stage s can hold layers start to stop
METHODS = "balanced, uniform, parameters, type:REGEX, or a list of layers per stage"


def weigh_layers(layers: Sequence[Layer], method: Any) -> list[int]:
    """Return the weight of each layer by `partition_method`; a list of layers per stage weighs none of them.

    Raises UserError for an unknown method, and a REGEX that matches nothing.
    """
    if isinstance(method, list | tuple) or method == "uniform":
        return [1] * len(layers)
    if method == "balanced":
        return map_alike(compute_work, layers)
    if method == "parameters":
        return map_alike(lambda layer: _num_parameters(layer) if layer.owns_weights else 0, layers)
    if isinstance(method, str) and method.startswith("type:"):
        return _matching_types(layers, method.removeprefix("type:"))
    raise UserError(f"partition_method={method} is unknown; one of {METHODS}")


def split_layers(
    weights: Sequence[int],
    num_stages: int,
    method: Any,
    *,
    fits: Fits | None = None,
    schedule: Schedule | None = None,
    tail: int = 1,
) -> list[int]:
    """Return the bounds of the split that `partition_method` names.

    weights: as `weigh_layers` returns them. fits: what `balanced` respects, where some split can and a stage is one
    chunk. schedule: says which chunks a stage has; None for one. tail: how many of the last layers have to be in one
    chunk. Raises UserError for a list that does not add up, or that cuts the tail.
    """
    num_layers = len(weights)
    if isinstance(method, list):
        bounds = _bounds_of_list(method, num_layers, num_stages, schedule.num_chunks if schedule else 1)
        if bounds[-2] > num_layers - tail:
            raise UserError(
                f"partition_method={method}: the last {tail} layers, those for further tokens (mtp.loss_coef) and the "
                f"head, have to be on one stage; give the last one {tail} layers or more"
            )
        return bounds
    if tail > 1:
        whole = [*weights[: num_layers - tail], sum(weights[num_layers - tail :])]

        def fits_whole(stage: int, start: int, stop: int) -> bool:
            assert fits is not None
            return fits(stage, start, num_layers if stop == len(whole) else stop)

        bounds = split_layers(whole, num_stages, method, fits=fits and fits_whole, schedule=schedule)
        return [*bounds[:-1], num_layers]
    if schedule is not None and schedule.num_chunks > 1:
        alike = replace(schedule, num_micro_batches=schedule.num_stages)  # on which the split does not depend
        return list(_balance_chunks(tuple(weights), alike))
    return _balance_within(tuple(weights), num_stages, fits if method == "balanced" else None)


def compute_work(layer: Layer) -> int:
    """Return the multiply-adds per token of the forward pass, up to a constant: the size of the layer's matrices; of
    experts, those that a token chooses.

    An embedding that is looked up costs nothing; the same module used as a head is a matrix product. Attention's own
    products (about T / (6 D) of a decoder layer) are the same for each decoder layer and omitted.
    """
    module = layer.build_on_meta()
    if isinstance(module, nn.Embedding) and not layer.is_tied_head:
        return 0
    config = next((argument for argument in layer.args if isinstance(argument, PretrainedConfig)), PretrainedConfig())
    blocks = 1 if layer.is_further else layer.num_blocks  # the head has the tokens of all depths
    return blocks * round(
        sum(parameter.numel() * active_share(name, config) for _, name, parameter in list_matrices(module))
    )


def balance(weights: Sequence[int], num_stages: int, fits: Fits | None = None) -> list[int] | None:
    """Return the contiguous split with the least maximal weight, no stage empty; among those, the one with the least
    sum of squares.

    fits: only splits all of whose stages fit are considered. Returns None when there is no such split. Exact, by
    dynamic programming over (stages, layers): O(P * L^2).
    """
    found = _best_split(weights, num_stages, max, fits)
    if found is None:
        return None
    least_maximum = found[0]
    found = _best_split(
        weights, num_stages, lambda best, weight: best + weight**2 if weight <= least_maximum else float("inf"), fits
    )
    assert found is not None
    return found[1]


@lru_cache(maxsize=256)  # a search of layouts asks for the same splits again and again
def _balance_evenly(weights: tuple[int, ...], num_stages: int) -> list[int]:
    bounds = balance(weights, num_stages)
    assert bounds is not None
    return bounds


@lru_cache(maxsize=256)
def _balance_chunks(weights: tuple[int, ...], schedule: Schedule) -> list[int]:
    return balance_chunks(weights, schedule)


def _balance_within(weights: Sequence[int], num_stages: int, fits: Fits | None) -> list[int]:
    """`balance` under `fits`, or without it where no split fits: then the plan reports what is missing."""
    bounds = list(_balance_evenly(tuple(weights), num_stages))
    if fits is None or all(fits(stage, start, stop) for stage, (start, stop) in enumerate(pairwise(bounds))):
        return bounds
    return balance(weights, num_stages, fits) or bounds


def _best_split(
    weights: Sequence[int], num_stages: int, combine: Callable[[float, float], float], fits: Fits | None
) -> tuple[float, list[int]] | None:
    prefix = [0]
    for weight in weights:
        prefix.append(prefix[-1] + weight)
    num_layers = len(weights)
    best: dict[int, tuple[float, list[int]]] = {0: (0, [0])}  # layers placed so far -> (cost, bounds)
    for stage in range(num_stages):
        still_needed = num_stages - stage - 1  # layers to leave, one for each later stage
        placed = {}
        for stop in range(stage + 1, num_layers - still_needed + 1):
            costs = [
                (combine(cost, prefix[stop] - prefix[start]), start)
                for start, (cost, _) in best.items()
                if start < stop
            ]
            if fits is None:
                chosen = min(costs, default=None)
            else:
                chosen = next((each for each in sorted(costs) if fits(stage, each[1], stop)), None)
            if chosen is not None:
                placed[stop] = (chosen[0], [*best[chosen[1]][1], stop])
        best = placed
    return best.get(num_layers)


def balance_chunks(weights: Sequence[int], schedule: Schedule) -> list[int]:
    """Return the split in which the heaviest stage weighs least, then the next one, ..., and with these the chunk that
    is heaviest for its share of a stage (`Schedule.target_fraction`), no chunk empty.

    Starts from evenly balanced chunks and moves a layer from one chunk to another (those between them shift by a layer)
    for as long as that is better. Optimal where decoder layers weigh the same and the others are few; all splits would
    be too many to try.
    """
    prefix = list(accumulate(weights, initial=0))
    held = [schedule.list_chunks(stage) for stage in range(schedule.num_stages)]
    num_chunks = schedule.last_chunk + 1
    shares = [schedule.target_fraction(chunk) for chunk in range(num_chunks)]

    def judge(bounds: Sequence[int]) -> tuple[list[int], list[float]]:
        chunks = [prefix[stop] - prefix[start] for start, stop in pairwise(bounds)]
        stages = [sum(chunks[number] for number in numbers) for numbers in held]
        return sorted(stages, reverse=True), sorted(map(operator.truediv, chunks, shares), reverse=True)

    best = _balance_within(weights, num_chunks, None)
    while True:
        moved = [
            [*best[: first + 1], *(bound + step for bound in best[first + 1 : last + 1]), *best[last + 1 :]]
            for first, last in combinations(range(num_chunks), 2)
            for step in (-1, 1)
        ]
        better = min(
            (bounds for bounds in moved if all(start < stop for start, stop in pairwise(bounds))),
            key=judge,
            default=best,
        )
        if judge(better) >= judge(best):
            return best
        best = better


def _bounds_of_list(sizes: list[int], num_layers: int, num_stages: int, num_chunks: int) -> list[int]:
    if not all(isinstance(size, int) for size in sizes):
        raise UserError(f"partition_method={sizes} must list whole numbers, the layers of each stage")
    if len(sizes) != num_stages * num_chunks or sum(sizes) != num_layers or min(sizes) < 1:
        virtual = f" x {num_chunks} chunks" if num_chunks > 1 else ""
        raise UserError(
            f"partition_method={sizes} gives {sum(sizes)} layers to {len(sizes)} stages; it must give "
            f"{num_layers} layers (embedding, norm and head count as one each) to num_stages={num_stages}{virtual}, "
            "at least one each"
        )
    bounds = [0]
    for size in sizes:
        bounds.append(bounds[-1] + size)
    return bounds


def _num_parameters(layer: Layer) -> int:
    return sum(parameter.numel() for parameter in layer.build_on_meta().parameters())


def _matching_types(layers: Sequence[Layer], regex: str) -> list[int]:
    try:
        matches = [int(bool(re.search(regex, layer.module_class.__name__, re.IGNORECASE))) for layer in layers]
    except re.error as error:
        raise UserError(f"partition_method=type:{regex} is not a valid regular expression ({error})") from None
    if not any(matches):
        known = ", ".join(sorted({layer.module_class.__name__ for layer in layers}))
        raise UserError(f"partition_method=type:{regex} matches no layer; their types are {known}")
    return matches
