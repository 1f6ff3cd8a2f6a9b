"""Which stage gets which layers: pure functions of the list of layers.

A split is given by its bounds, P x V + 1 layer indices of V chunks per stage: chunk c is layers bounds[c] to bounds[c +
1]; a schedule says on which stage it is (`Schedule.find_stage`). With one chunk per stage, chunk s is stage s.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, combinations, pairwise
from typing import Any

import numpy as np

from console import pluralize
from errors import UserError
from models.architecture.alike import map_alike
from models.layers.layer import Layer
from training.pipeline.schedule import OneForwardOneBackward, Schedule

# Where the longest range of layers that stage s can hold from `start` on stops; `start` where it can hold none
FindStop = Callable[[int, int], int]
ALIKE = 1.05  # times the heaviest stage is as good: the times of layers are not known more precisely
METHODS = "balanced, uniform, parameters, type:REGEX, or a list of layers per stage"


def weigh_layers(layers: Sequence[Layer], method: Any) -> list[int]:
    """Return the weight of each layer by `partition_method`; a list of layers per stage weighs none of them, and
    `balanced` weighs them by their time (`training/cost_terms/split.py`).

    Raises UserError for an unknown method, and a REGEX that matches nothing.
    """
    if isinstance(method, list | tuple) or method == "uniform":
        return [1] * len(layers)
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
    find_stop: FindStop | None = None,
    schedule: Schedule | None = None,
    tail: int = 1,
    joined: Collection[int] = (),
) -> list[int]:
    """Return the bounds of the split that `partition_method` names.

    weights: as `weigh_layers` returns them. find_stop: what `balanced` respects, where some split can and a stage is
    one chunk. schedule: says which chunks a stage has; None for one. tail: how many of the last layers have to be in
    one chunk. joined: the layers that have to be in one chunk with the one before them. Raises UserError for a list
    that does not add up, or that cuts the tail or before a joined layer.
    """
    num_layers = len(weights)
    starts = [index for index in range(num_layers - tail + 1) if index not in joined]  # of what can be a chunk
    if isinstance(method, list):
        bounds = _bounds_of_list(method, num_layers, num_stages, schedule.num_chunks if schedule else 1)
        if bounds[-2] > num_layers - tail:
            raise UserError(
                f"partition_method={method}: the last {tail} layers, those for further tokens (mtp.loss_coef) and the "
                f"head, have to be on one stage; give the last one {tail} layers or more"
            )
        if cut := [bound for bound in bounds[1:-1] if bound in joined]:
            nearest = min(starts, key=lambda start: abs(start - cut[0]))
            raise UserError(
                f"partition_method={method}: a stage cannot begin with layer {cut[0]} (the embedding is layer 0), "
                "which takes more from the layer before it than stages send; the nearest that it can begin with is "
                f"{nearest}"
            )
        return bounds
    edges = [*starts, num_layers]
    whole = [sum(weights[start:stop]) for start, stop in pairwise(edges)]  # of the parts that no split cuts
    if schedule is not None and schedule.num_chunks > 1:
        alike = replace(schedule, num_micro_batches=schedule.num_stages)  # on which the split does not depend
        found = list(_balance_chunks(tuple(whole), alike))
    elif find_stop is None or method != "balanced":
        found = _balance_within(whole, num_stages, None, schedule if method == "balanced" else None)
    else:
        found = _balance_within(
            whole, num_stages, lambda stage, start: bisect_right(edges, find_stop(stage, edges[start])) - 1, schedule
        )
    return [edges[bound] for bound in found]


def balance(
    weights: Sequence[int], num_stages: int, find_stop: FindStop | None = None, schedule: Schedule | None = None
) -> list[int] | None:
    """Return the contiguous split with the least maximal weight, no stage empty; among those, the one with the least
    sum of squares.

    find_stop: only splits whose stages all fit are considered. schedule: where it is 1F1B, a heaviest stage within
    `ALIKE` of the least is as good, and of these splits the one with the shortest step is taken first. Returns None
    when there is no such split. Exact, by dynamic programming over (stages, layers): O(P * L^2).
    """
    prefix = np.cumsum([0.0, *weights])
    own = prefix[None, :] - prefix[:, None]  # weight of the layers from a row's to before a column's [L+1, L+1]
    allowed = _list_allowed(len(weights), num_stages, find_stop)
    found = _best_split([np.where(each, own, np.inf) for each in allowed], np.maximum)
    if found is None:
        return None
    most = found[0]
    if isinstance(schedule, OneForwardOneBackward) and schedule.num_micro_batches >= num_stages:
        most *= ALIKE
        steps = [_bound_step(stage, prefix, schedule) for stage in range(num_stages)]
        allowed = [each & (own <= most) for each in allowed]
        found = _best_split([np.where(each, step, np.inf) for each, step in zip(allowed, steps)], np.maximum)
        assert found is not None
        allowed = [each & (step <= found[0]) for each, step in zip(allowed, steps)]
    found = _best_split([np.where(each & (own <= most), own, np.inf) ** 2 for each in allowed], np.add)
    assert found is not None
    return found[1]


def _bound_step(stage: int, prefix: Any, schedule: Schedule) -> Any:
    """Return the time from the first pass to the last of a stage that holds the layers from a row's to before a
    column's [L+1, L+1]; a step takes as long as the largest of its stages'.

    Under 1F1B a stage waits for the stages after it twice. Before its first backward pass it runs a forward pass for
    each of them meanwhile; before its last ones, as many backward passes. A backward pass counts as two thirds of a
    stage's time, as it is without recomputation.
    """
    own, after = prefix[None, :] - prefix[:, None], prefix[-1] - prefix[None, :]
    ahead = (schedule.num_stages - 1 - stage) * own / 3
    waiting = np.maximum(after - ahead, 0) + np.maximum(after - 2 * ahead, 0)
    return prefix[:, None] + schedule.num_micro_batches * own + waiting


@lru_cache(maxsize=256)  # a search of layouts asks for the same splits again and again
def _balance_evenly(weights: tuple[int, ...], num_stages: int, schedule: Schedule | None) -> list[int]:
    bounds = balance(weights, num_stages, schedule=schedule)
    assert bounds is not None
    return bounds


def _balance_within(
    weights: Sequence[int], num_stages: int, find_stop: FindStop | None, schedule: Schedule | None = None
) -> list[int]:
    """`balance` under `find_stop`, or without it where no split fits: then the plan reports what is missing."""
    bounds = list(_balance_evenly(tuple(weights), num_stages, schedule))
    if find_stop is None or all(bounds[stage + 1] <= find_stop(stage, bounds[stage]) for stage in range(num_stages)):
        return bounds
    return balance(weights, num_stages, find_stop, schedule) or bounds


def _list_allowed(num_layers: int, num_stages: int, find_stop: FindStop | None) -> list[Any]:
    """Return of each stage whether it can hold the layers from a row's to before a column's [L+1, L+1]."""
    is_stage = np.triu(np.ones((num_layers + 1, num_layers + 1), dtype=bool), 1)
    if find_stop is None:
        return [is_stage] * num_stages
    listed, numbers = [], np.arange(num_layers + 1)
    starts = numbers == 0
    for stage in range(num_stages):
        stops = [find_stop(stage, start) if starts[start] else 0 for start in range(num_layers)]
        listed.append(is_stage & (numbers <= np.array([*stops, 0])[:, None]))
        starts = listed[-1].any(axis=0)
    return listed


def _best_split(costs: Sequence[Any], combine: Callable[[Any, Any], Any]) -> tuple[float, list[int]] | None:
    """Return the least cost and the bounds of a split; None where all cost infinitely much.

    costs: of each stage, by its first layer and the one after its last [L+1, L+1], in double precision: integers are
    exact up to 2^53. combine: adds up the costs of stages.
    """
    best = np.full(len(costs[0]), np.inf)  # by the number of layers placed so far
    best[0] = 0
    starts = []  # of each stage, by its stop
    for each in costs:
        combined = combine(best[:, None], each)
        starts.append(combined.argmin(axis=0))
        best = combined.min(axis=0)
    if not np.isfinite(best[-1]):
        return None
    bounds = [len(best) - 1]
    for each in reversed(starts):
        bounds.append(int(each[bounds[-1]]))
    return float(best[-1]), bounds[::-1]


def balance_chunks(weights: Sequence[int], schedule: Schedule) -> list[int]:
    """Return the split in which the heaviest stage weighs least, then the next one, ..., and with these the chunk that
    is heaviest for its share of a stage (`Schedule.target_fraction`), no chunk empty.

    Starts from evenly balanced chunks and moves a layer from one chunk to another (those between them shift by a layer)
    for as long as that is better. Optimal where decoder layers weigh the same and the others are few; all splits would
    be too many to try.
    """
    prefix = np.cumsum([0, *weights])
    held = np.array([schedule.list_chunks(stage) for stage in range(schedule.num_stages)])  # [P, V]
    num_chunks = schedule.last_chunk + 1
    shares = np.array([schedule.target_fraction(chunk) for chunk in range(num_chunks)])
    moves = np.array(list(combinations(range(num_chunks), 2)))  # between the first chunk and the second
    numbers = np.arange(num_chunks + 1)
    shifted = ((moves[:, :1] < numbers) & (numbers <= moves[:, 1:])).astype(int)  # bounds that a move shifts

    def find_best(splits: Any) -> int:
        chunks = np.diff(prefix[splits])  # [K, P x V] of K splits
        left = np.arange(len(splits))
        for weights in (chunks[:, held].sum(axis=2), chunks / shares):  # [K, P], [K, P x V]
            heaviest = -np.sort(-weights[left])
            while len(left) > 1 and heaviest.shape[1] > 0:
                least = heaviest[:, 0] == heaviest[:, 0].min()
                left, heaviest = left[least], heaviest[least, 1:]
        return int(left[0])  # of those that are as good the first

    best = np.array(_balance_within(weights, num_chunks, None))
    while True:
        moved = np.stack([best - shifted, best + shifted], axis=1).reshape(-1, len(numbers))
        splits = np.vstack([best, moved[(np.diff(moved) > 0).all(axis=1)]])
        found = find_best(splits)
        if found == 0:
            return list(map(int, best))
        best = splits[found]


_balance_chunks = lru_cache(maxsize=256)(balance_chunks)


def _bounds_of_list(sizes: list[int], num_layers: int, num_stages: int, num_chunks: int) -> list[int]:
    if not all(isinstance(size, int) for size in sizes):
        raise UserError(f"partition_method={sizes} must list whole numbers, the layers of each stage")
    if len(sizes) != num_stages * num_chunks or sum(sizes) != num_layers or min(sizes) < 1:
        virtual = f" x {num_chunks} chunks" if num_chunks > 1 else ""
        raise UserError(
            f"partition_method={sizes} gives {pluralize(sum(sizes), 'layer')} to "
            f"{pluralize(len(sizes), 'stage')}; it must give "
            f"{num_layers} layers (embedding, norm and head count as one each) to num_stages={num_stages}{virtual}, "
            "at least one each"
        )
    return [0, *accumulate(sizes)]


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
