"""`plan=search`: the fastest layouts that fit, best first.

What is tried (`search_space.py`): every way to share layers, sequences and experts, with every number of stages and
every micro-batch size, under every schedule; each with the least recomputation that fits and, where it does not fit
without, with more of it and with overrides that save memory.

A layout is not listed where it does not fit, where the run would refuse its keys, or where `SHOWN` others are faster.
And it is not tried

- with recomputation or overrides that it has the memory to do without: those cost time (`_list_choices`);
- under another schedule where it does not fit under 1F1B: none of them takes much less memory;
- under a schedule that is ordered by rules (`zero_bubble`), but for the `MOST_ORDERS` that promise most of those with
  at most `MOST_PASSES` passes.

Planning the memory of a layout, and a bound of its step, is cheap next to simulating a schedule. So layouts are looked
at in the order of what their step takes at least, and only what can be among the fastest is simulated.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import replace

from errors import UserError
from training.config.schema import RunConfig
from training.costs.hardware import Machine
from training.distributed.topology import build_layout
from training.pipeline.schedules import SCHEDULES
from training.planner.plan import Plan
from training.planner.search_space import (
    CHECKPOINTING,
    PLAIN,
    UNUSED,
    Candidate,
    Planner,
    SharedModels,
    Sharing,
    list_choices,
    list_layouts,
    list_named,
    list_sharings,
)

SHOWN = 10  # layouts
MOST_ORDERS = 6  # layouts whose passes are ordered by trying rules, which takes a second each
MOST_PASSES = 1024  # stages x micro-batches of those
ORDERED = [name for name, schedule in SCHEDULES.items() if schedule.splits_backward]
UNORDERED = [PLAIN, *(name for name in SCHEDULES if name not in (PLAIN, *ORDERED))]


class _Fastest:
    """The fastest candidates that were offered, best first, at most `most`."""

    def __init__(self, most: int) -> None:
        self.most, self.candidates = most, list[Candidate]()

    @property
    def limit(self) -> float:
        """The seconds that the step of a further one has to be shorter than."""
        return self.candidates[-1].plan.step_seconds if len(self.candidates) == self.most else math.inf

    def offer(self, candidate: Candidate) -> None:
        """Take a candidate where it fits and is faster, once."""
        plan = candidate.plan
        if (
            plan.fits
            and _bound(plan) + plan.reduce_seconds < self.limit
            and all(candidate is not other for other in self.candidates)
        ):
            bisect.insort(self.candidates, candidate, key=lambda each: each.plan.step_seconds)
            del self.candidates[self.most :]


def search_plans(
    config: RunConfig,
    models: SharedModels,
    machine: Machine,
    *,
    most: int = SHOWN,
    among: Sequence[Sharing] = (),
) -> list[Candidate]:
    """Return the fastest layouts that fit, `most` of them, best first; where none does, the one that lacks the least
    memory.

    models: of `config`, or of one that differs in `world_size` alone. among: the ways to share that are tried; empty
    for all. Raises UserError when the global batch cannot be cut for any split, or where the run would refuse every
    layout.
    """
    world_size, num_layers, total = int(config.world_size), models.model.num_units, config.global_batch_size
    if total is None:
        total = build_layout(config, world_size, num_layers, has_accelerator=True).global_batch_size
    sharings = among or list_sharings(models, world_size, machine.cards_per_node)
    keys = replace(config, plan=True, global_batch_size=total, gradient_accumulation_steps=None, **UNUSED)
    resplits = isinstance(config.partition_method, list)  # which serves one number of stages only
    if resplits:
        keys = replace(keys, partition_method="balanced")
    layouts = [each for sharing in sharings for each in list_layouts(sharing.apply(keys), world_size, num_layers)]
    if not layouts:
        raise UserError(
            f"no split of world_size={world_size} divides global_batch_size={total}; "
            "give a multiple of a divisor of world_size"
        )
    planner = Planner(models, machine, list_named(sharings, resplits))
    scheduled = [replace(each, schedule=name) for each in layouts for name in UNORDERED[: each.num_stages]]
    opened = [whole for each in scheduled if (whole := planner.choose(each, CHECKPOINTING[0], {}))]
    if not opened:
        planner.plan(scheduled[0], {})  # raises what the run would
    fastest, tried = _Fastest(most), list(opened)
    for whole in sorted(opened, key=lambda each: _bound(each.plan)):
        if _bound(whole.plan) >= fastest.limit:
            break
        for candidate in list_choices(planner, whole, lambda plan: _bound(plan) >= fastest.limit):
            tried.append(candidate)
            fastest.offer(candidate)
    for name in ORDERED:
        _order(planner, [whole for whole in opened if whole.keys.schedule == PLAIN], name, fastest)
    return fastest.candidates or [min(tried, key=_measure_lack)]


def _order(planner: Planner, opened: Sequence[Candidate], name: str, fastest: _Fastest) -> None:
    """Offer what fits under 1F1B under a schedule that is ordered by rules: of the layouts that promise most, and with
    more recomputation where it does not fit then."""
    num_orders = 0
    for whole in sorted(opened, key=lambda each: _bound_any(each.plan)):
        if num_orders == MOST_ORDERS or _bound_any(whole.plan) >= fastest.limit:
            break
        layout = whole.plan.layout
        if 1 < layout.num_stages and layout.num_stages * layout.gradient_accumulation_steps <= MOST_PASSES:
            choices = list_choices(planner, whole, lambda plan: _bound_any(plan) >= fastest.limit)
            ordered = [_reschedule(planner, each, name) for each in choices if each.plan.fits]
            for candidate in filter(None, ordered):
                fastest.offer(candidate)
            num_orders += any(ordered)


def _reschedule(planner: Planner, plain: Candidate, name: str) -> Candidate | None:
    """Return a candidate under another schedule, with more recomputation where it does not fit then; None where the run
    would refuse it."""
    level = next(level for level, choices in enumerate(CHECKPOINTING) if plain.checkpointing in choices)
    candidate = None
    for choices in CHECKPOINTING[level:]:
        candidate = planner.choose(replace(plain.keys, schedule=name), choices, plain.memory_overrides)
        if candidate is None or candidate.plan.fits:
            break
    return candidate


def _bound(plan: Plan) -> float:
    """The seconds that a step takes at least: a stage's passes, after the first micro-batch has come to it and, where
    no gradients of weights are put off, before the last gradients have gone back. The longest of any stage."""
    ways = 1 if plan.schedule.splits_backward else 2
    outside = [0.0]  # of each chunk, for the chunks before it
    for chunk in plan.chunks:
        passes = chunk.forward_seconds + (ways - 1) * chunk.backward_seconds
        outside.append(outside[-1] + passes + ways * chunk.transfer_seconds)
    first = (outside[min(plan.schedule.list_chunks(stage.stage_id))] for stage in plan.stages)
    return max(map(sum, zip(first, plan.busy_seconds, strict=True))) + plan.optimizer_seconds


def _bound_any(plan: Plan) -> float:
    """The seconds that a step takes at least under any schedule, whatever its split, and with whatever saves memory:
    all stages work alike, none waits, and gradients are reduced during the passes."""
    return (sum(plan.busy_seconds) + sum(stage.optimizer_seconds for stage in plan.stages)) / len(plan.stages)


def _measure_lack(candidate: Candidate) -> float:
    """Bytes by which a layout exceeds the memory of GPUs and hosts."""
    plan = candidate.plan
    return max(plan.missing_memory, 0) + max(plan.missing_host_memory, 0)
