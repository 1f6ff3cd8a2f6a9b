"""`plan=search`: the fastest layouts that fit, best first.

Planning the memory of a layout and a bound of its step is cheap, simulating its schedule is not. So layouts are planned
with nothing recomputed and no memory saved, which is faster than what makes them fit, and are ranked by the bound. In
that order they are planned with what makes them fit, and simulated, until `SHOWN` found steps are shorter than every
bound that is left.

Why a layout is not listed: it does not fit, the run would refuse its keys, `SHOWN` others are faster, or it is not
tried. What is tried (`space.py`):

- every number of stages; micro-batches in powers of two. Not another global batch.
- the config's own sizes and modes of tensor, context and expert parallelism, and powers of two: of tensor parallelism
  within a node, of context parallelism up to `MOST_SHARING` for samples of `LONG` tokens, of experts up to
  `MOST_DIVIDING`.
- the levels of recomputation in `CHECKPOINTING`, and with each the overrides in `SAVING`. Not a further level where a
  layout has room at one, but for `selective`; not an override where it has room without, or with fewer.
- each schedule, where the layout fits with most memory saved under 1F1B: no other schedule takes much less. Of those
  that are ordered by rules (zero bubble), only the `MOST_ORDERS` candidates that promise most, of at most `MOST_PASSES`
  passes.
- the config's `partition_method`, or `balanced` where it is a list; layers on other stages than that says where a stage
  has too much.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from errors import UserError
from extensions.search.space import (
    CHECKPOINTING,
    PLAIN,
    Candidate,
    Planner,
    SharedModels,
    Sharing,
    list_choices,
    list_layouts,
    list_schedules,
    list_sharings,
)
from training.config.schema import RunConfig
from training.costs.hardware import Machine
from training.pipeline.schedules import schedule_layout

SHOWN = 10  # layouts
MOST_ORDERS = 6  # candidates whose passes are ordered by trying rules, which takes a second each
MOST_PASSES = 1024  # stages x micro-batches of those


class _Fastest:
    """The fastest candidates that were offered, best first, at most `most`."""

    def __init__(self, most: int) -> None:
        self.most, self.candidates = most, list[Candidate]()

    @property
    def limit(self) -> float:
        """The seconds that the step of a further one has to be shorter than."""
        return self.candidates[-1].plan.step_seconds if len(self.candidates) == self.most else math.inf

    def offer(self, candidate: Candidate) -> None:
        """Take a candidate, which is simulated, where it is faster; once, as several ways lead to some."""
        if candidate.plan.step_seconds < self.limit and all(candidate is not other for other in self.candidates):
            bisect.insort(self.candidates, candidate, key=lambda each: each.plan.step_seconds)
            del self.candidates[self.most :]


def search_plans(
    config: RunConfig, models: SharedModels, machine: Machine, *, most: int = SHOWN, among: Sequence[Sharing] = ()
) -> list[Candidate]:
    """Return the fastest layouts that fit, `most` of them, best first; where none does, the one that lacks the least
    memory.

    models: of `config`, or of one that differs in `world_size` alone. among: the ways to share that are tried; empty
    for all. Raises UserError when the global batch cannot be cut for any split, or where the run would refuse every
    layout.
    """
    sharings = among or list_sharings(models, int(config.world_size), machine.cards_per_node)
    planner = Planner(models, machine)
    layouts = list_layouts(config, sharings, models.model.num_units)
    bases = [base for keys in layouts if (base := planner.choose(keys, CHECKPOINTING[0]))]
    if not bases:
        planner.plan(layouts[0])  # raises what the run would
    fastest = _Fastest(most)
    for base in sorted(bases, key=_bound_saving):
        if _bound_saving(base) >= fastest.limit:
            break
        for candidate in list_choices(planner, base, lambda plain: _bound_saving(plain) >= fastest.limit):
            if candidate.plan.fits and _bound(candidate) < fastest.limit:
                fastest.offer(candidate)
    for name in list_schedules(ordered=True):
        _order(planner, bases, name, fastest)
    return fastest.candidates or [min(planner.known.values(), key=lambda candidate: candidate.plan.lack)]


def _order(planner: Planner, bases: Sequence[Candidate], name: str, fastest: _Fastest) -> None:
    """Offer candidates under a schedule that is ordered by rules: those that promise most, of what fits under 1F1B, and
    with more recomputation where they do not fit then."""
    waiting: list[Candidate] = []
    for base in sorted((each for each in bases if _may_order(planner, each, name)), key=_bound_any):
        promise_more = [candidate for candidate in waiting if _bound_any(candidate) <= _bound_any(base)]
        if len(promise_more) >= MOST_ORDERS or _bound_any(base) >= fastest.limit:
            break
        tried = list_choices(planner, base, lambda plain: _bound_any(plain) >= fastest.limit)
        waiting += [candidate for candidate in tried if candidate.plan.fits and _may_order(planner, candidate, name)]
    waiting.sort(key=_bound_any)
    for _ in range(MOST_ORDERS):
        if not waiting or _bound_any(waiting[0]) >= fastest.limit:
            break
        plain = waiting.pop(0)
        ordered = planner.choose(replace(plain.keys, schedule=name), [plain.checkpointing])
        if ordered is not None and ordered.plan.fits:
            fastest.offer(ordered)
        elif plain.checkpointing not in CHECKPOINTING[-1]:
            following = next(
                after for before, after in itertools.pairwise(CHECKPOINTING) if plain.checkpointing in before
            )
            if recomputed := planner.choose(plain.keys, following):
                bisect.insort(waiting, recomputed, key=_bound_any)


def _may_order(planner: Planner, candidate: Candidate, name: str) -> bool:
    layout, keys = candidate.plan.layout, replace(candidate.keys, schedule=name)
    with suppress(UserError):
        schedule_layout(layout, keys, planner.models.model.num_units)
        num_passes = layout.num_stages * layout.gradient_accumulation_steps
        return candidate.keys.schedule == PLAIN and layout.num_stages > 1 and num_passes <= MOST_PASSES
    return False


def _bound(candidate: Candidate) -> float:
    """The seconds that a step takes at least: a stage's passes, after the first micro-batch has come to it and before
    the last gradients have gone back. The longest of any stage."""
    plan, outside = candidate.plan, [0.0]  # of each chunk, for the chunks before it
    for chunk in plan.chunks:
        passes = chunk.cost.forward_seconds + chunk.cost.backward_seconds
        outside.append(outside[-1] + passes + 2 * chunk.transfer_seconds)
    first = (outside[min(plan.schedule.list_chunks(stage.stage_id))] for stage in plan.stages)
    return max(map(sum, zip(first, plan.busy_seconds, strict=True))) + plan.reduce_seconds + plan.optimizer_seconds


def _bound_saving(candidate: Candidate) -> float:
    """The seconds that a step takes at least with any override that saves memory: ZeRO stage 3, where layers are not
    shared, reduces during the passes, and stage 2 sends less in one micro-batch."""
    shares_layers = candidate.keys.num_stages * candidate.keys.tensor_parallel_size > 1
    reduces_alike = shares_layers and candidate.plan.layout.gradient_accumulation_steps > 1
    return _bound(candidate) - (0 if reduces_alike else candidate.plan.reduce_seconds)


def _bound_any(candidate: Candidate) -> float:
    """The seconds that a step takes at least under any schedule, whatever its split: all stages work alike, and none
    waits."""
    plan = candidate.plan
    return (sum(plan.busy_seconds) + sum(stage.optimizer_seconds for stage in plan.stages)) / len(plan.stages)
