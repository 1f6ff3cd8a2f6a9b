"""`plan=search`: the fastest layouts that fit, of all that `search_space.py` lists, best first.

A layout is opened with all activations kept and no memory saved, whose step is a bound: whatever makes it fit takes
longer. The one with the least bound is looked at next. If it fits, it is simulated, and tried under the other
schedules; if not, it is tried with each override that saves memory, and with more recomputation. The search ends when
`SHOWN` layouts are found whose steps are shorter than every bound that is left.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from errors import UserError
from training.config.incompatible import CheckedConfig, check_together
from training.config.schema import CheckpointMode, RunConfig
from training.config.validate import check_config
from training.costs.hardware import Machine
from training.distributed.topology import Layout, build_layout
from training.pipeline.schedules import SCHEDULES, find_schedule
from training.planner.plan import Plan, plan_resolved
from training.planner.search_space import (
    CHECKPOINTING,
    SAVING,
    SAVING_IN_ONE,
    UNUSED,
    Candidate,
    SharedModels,
    Sharing,
    build_keys,
    list_layouts,
    list_schedules,
    list_sharings,
    list_tried,
    moves_activations,
    shards,
)
from training.resolution.resolve import place_layers, resolve_layout
from training.resolution.target import Target

SHOWN = 10  # layouts
MOST_ORDERS = 6  # layouts whose passes are ordered by trying rules, which takes a second each
MOST_PASSES = 1024  # stages x micro-batches of those
PLAIN = "1f1b"  # the schedule that a layout is opened with


def search_plans(
    config: RunConfig,
    models: SharedModels,
    machine: Machine,
    *,
    most: int = SHOWN,
    among: Sequence[Sharing] = (),
) -> list[Candidate]:
    """Return the fastest layouts that fit, `most` of them, best first; then those that were tried and do not, by the
    memory that they lack.

    models: of `config`, or of one that differs in `world_size` alone. among: the ways to share that are tried; empty
    for all. Raises UserError when the global batch cannot be cut for any split, or where the run would refuse every
    layout that fits.
    """
    search = _Search(config, models, machine, among)
    found = search.run(most)
    if not found:
        raise UserError(
            f"no split of world_size={config.world_size} divides global_batch_size={search.global_batch_size}; "
            "give a multiple of a divisor of world_size"
        )
    return found


class _Search:
    def __init__(self, config: RunConfig, models: SharedModels, machine: Machine, among: Sequence[Sharing]) -> None:
        # A list of layers per stage serves one number of stages only
        self._resplits = isinstance(config.partition_method, list)
        self._config = replace(config, partition_method="balanced") if self._resplits else config
        self._models, self._machine = models, machine
        self._num_layers, self._world_size = models.model.num_units, int(config.world_size)
        self.global_batch_size = _global_batch_size(config, self._world_size, self._num_layers)
        self._sharings = among or list_sharings(models, self._world_size, machine.cards_per_node)
        self._tried = list_tried(self._sharings)
        neutral = replace(config, activation_checkpoint_interval=0, activation_checkpoint_mode=CHECKPOINTING[0][0][0])
        neutral = replace(neutral, **UNUSED)
        self._schedules = [name for name in SCHEDULES if name != PLAIN and self._goes(replace(neutral, schedule=name))]
        self._orders_left = MOST_ORDERS
        # (seconds that a step takes at least, in the order of coming, what to do next)
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()
        self._known: dict[Any, Candidate] = {}
        self._expanded: set[tuple[Layout, Sharing, int]] = set()
        self._best: list[Candidate] = []
        self._refusals: list[UserError] = []

    def run(self, most: int) -> list[Candidate]:
        """As `search_plans`; empty where no layout divides the global batch."""
        for sharing in self._sharings:
            for layout in list_layouts(
                self._config, sharing, self._world_size, self._num_layers, self.global_batch_size
            ):
                self._open(layout, sharing, 0)
        while self._queue and len(self._best) < most:
            *_, proceed = heapq.heappop(self._queue)
            proceed()
        if self._refusals and not self._best:
            raise self._refusals[0]
        lacking = [candidate for candidate in self._known.values() if not candidate.plan.fits]
        # Backward passes in two parts gather less (`LayerCost.regathers`), which the bound of a schedule does not know
        best = sorted(self._best, key=lambda candidate: candidate.plan.step_seconds)
        return [*best, *sorted(lacking, key=_measure_lack)]

    def _push(self, seconds: float, proceed: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (seconds, next(self._number), proceed))

    def _open(self, layout: Layout, sharing: Sharing, level: int) -> None:
        """Queue a layout by the least bound of its schedules; where backward passes are in two parts, none is known
        before they are ordered, and few are."""
        plain = self._try_choices(layout, sharing, level, {})
        assert plain is not None
        bounds = [_bound(plain.plan)]
        for other in self._list_others(plain):
            if not find_schedule(other.schedule).splits_backward:
                bounds.append(_bound(self._try(other, sharing, plain.checkpointing, {}).plan))
            elif self._may_order(other):
                self._push(_bound_rescheduled(plain.plan), partial(self._expand_to_order, plain, level, other))
        self._push(min(bounds), partial(self._expand, plain, level))

    def _list_others(self, plain: Candidate) -> Iterator[Layout]:
        return list_schedules(plain.plan.layout, self._config, self._schedules, self._num_layers)

    def _may_order(self, layout: Layout) -> bool:
        return self._orders_left > 0 and layout.num_stages * layout.gradient_accumulation_steps <= MOST_PASSES

    def _expand_to_order(self, plain: Candidate, level: int, layout: Layout) -> None:
        if self._may_order(layout):
            self._expand(plain, level)

    def _expand(self, plain: Candidate, level: int) -> None:
        """Go on with a layout under 1F1B: time it where it fits, else try what saves memory."""
        layout, sharing = plain.plan.layout, plain.sharing
        if (layout, sharing, level) in self._expanded:
            return
        self._expanded.add((layout, sharing, level))
        if not plain.plan.fits and level == 0 and not self._can_fit(layout, sharing):
            return
        self._offer(plain, level)
        more = SAVING if not plain.has_room else SAVING_IN_ONE if layout.gradient_accumulation_steps == 1 else ()
        enough: list[Mapping[str, Any]] = []
        for memory_overrides in more:
            if any(fewer.items() < memory_overrides.items() for fewer in enough):
                continue
            if candidate := self._try_choices(layout, sharing, level, memory_overrides):
                self._offer(candidate, level)
                if candidate.has_room:
                    enough.append(memory_overrides)
        if not plain.has_room and level + 1 < len(CHECKPOINTING):
            self._open(layout, sharing, level + 1)

    def _can_fit(self, layout: Layout, sharing: Sharing) -> bool:
        """Whether the layout fits with all layers recomputed and any of the overrides."""
        last = len(CHECKPOINTING) - 1
        tried = (self._try_choices(layout, sharing, last, memory_overrides) for memory_overrides in ({}, *SAVING))
        return any(candidate is not None and candidate.plan.fits for candidate in tried)

    def _offer(self, candidate: Candidate, level: int) -> None:
        """Queue a candidate under 1F1B, and the same under the other schedules: none of them takes much less memory."""
        if not candidate.plan.fits:
            return
        self._push(_bound(candidate.plan), partial(self._simulate, candidate))
        for layout in self._list_others(candidate):
            self._push(_bound_rescheduled(candidate.plan), partial(self._reschedule, candidate, layout, level))

    def _reschedule(self, plain: Candidate, layout: Layout, level: int) -> None:
        """Try a candidate under another schedule, and with more recomputation where it does not fit then."""
        if find_schedule(layout.schedule).splits_backward:
            keys = build_keys(self._config, layout, plain.sharing, plain.checkpointing, plain.memory_overrides)
            if not self._may_order(layout) or not self._goes(keys):
                return
            self._orders_left -= 1
        candidate = self._try(layout, plain.sharing, plain.checkpointing, plain.memory_overrides)
        if candidate.plan.fits:
            self._push(_bound(candidate.plan), partial(self._simulate, candidate))
        elif level + 1 < len(CHECKPOINTING):
            following = self._try_choices(plain.plan.layout, plain.sharing, level + 1, plain.memory_overrides)
            if following is not None:
                self._push(_bound_rescheduled(following.plan), partial(self._reschedule, following, layout, level + 1))

    def _simulate(self, candidate: Candidate) -> None:
        self._push(candidate.plan.step_seconds, partial(self._accept, candidate))

    def _accept(self, candidate: Candidate) -> None:
        """Take a candidate, no other one being faster, once, and unless the run would refuse its keys."""
        if any(candidate is other for other in self._best):
            return
        try:
            keys = replace(candidate.keys, plan=True)
            check_config(keys, has_accelerator=True)
            target = Target(self._world_size, True, self._machine, is_planned=True)
            resolve_layout(self._models.get(candidate.sharing), keys, target)
            self._best.append(candidate)
        except UserError as error:
            self._refusals.append(error)

    def _try_choices(
        self, layout: Layout, sharing: Sharing, level: int, memory_overrides: Mapping[str, Any]
    ) -> Candidate | None:
        """The choice of a level of recomputation that takes the least memory, without overrides or, with activations on
        the host, in the smallest groups; None where the run cannot have `memory_overrides`, or they save nothing."""
        choices: Sequence[tuple[CheckpointMode, int]] = CHECKPOINTING[level]
        if memory_overrides:
            if shards(memory_overrides) and layout.num_weight_replicas == 1:
                return None
            plain = self._try_choices(layout, sharing, level, {})
            assert plain is not None
            choices = choices[:1] if moves_activations(memory_overrides) else [plain.checkpointing]
            if not _can_save(plain.plan, memory_overrides) or not self._goes(
                build_keys(self._config, layout, sharing, choices[0], memory_overrides)
            ):
                return None
        tried = [self._try(layout, sharing, choice, memory_overrides) for choice in choices]
        return min(tried, key=lambda candidate: candidate.plan.fullest.memory.peak)

    def _goes(self, config: RunConfig) -> bool:
        """Whether keys go together."""
        with suppress(UserError):
            keys = replace(config, plan=True)
            check_config(keys, has_accelerator=True)
            check_together(CheckedConfig(keys))
            return True
        return False

    def _try(
        self,
        layout: Layout,
        sharing: Sharing,
        checkpointing: tuple[CheckpointMode, int],
        memory_overrides: Mapping[str, Any],
    ) -> Candidate:
        """Plan the layout; look for an uneven split, which takes long, only where it may save memory."""
        known = layout, sharing, checkpointing, tuple(memory_overrides.items())
        if known not in self._known:
            keys = build_keys(self._config, layout, sharing, checkpointing, memory_overrides)
            model, target = self._models.get(sharing), Target(self._world_size, True, is_planned=True)
            plan = plan_resolved(place_layers(model, keys, layout, target), self._machine)
            is_moved = layout.num_chunks == 1 and _may_fit_otherwise(plan, self._config)
            if is_moved:
                target = replace(target, machine=self._machine)
                plan = plan_resolved(place_layers(model, keys, layout, target), self._machine)
            self._known[known] = Candidate(
                keys, checkpointing, memory_overrides, plan, sharing, self._tried, self._resplits, is_moved
            )
        return self._known[known]


def _bound(plan: Plan) -> float:
    """The seconds that a step takes at least: a stage's passes, after the first micro-batch has come to it and, where
    no gradients of weights are put off, before the last gradients have gone back. The longest of any stage."""
    ways = 1 if find_schedule(plan.layout.schedule).splits_backward else 2
    outside = [0.0]  # of each chunk, for the chunks before it
    for chunk in plan.chunks:
        passes = chunk.forward_seconds + (ways - 1) * chunk.backward_seconds
        outside.append(outside[-1] + passes + ways * chunk.transfer_seconds)
    first = (outside[min(plan.schedule.list_chunks(stage.stage_id))] for stage in plan.stages)
    return max(map(sum, zip(first, plan.busy_seconds, strict=True))) + plan.reduce_seconds + plan.optimizer_seconds


def _bound_rescheduled(plan: Plan) -> float:
    """The seconds that a step takes at least under any schedule, whatever its split: all stages work alike, none waits,
    and gradients are reduced during the passes."""
    return (sum(plan.busy_seconds) + sum(stage.optimizer_seconds for stage in plan.stages)) / len(plan.stages)


def _can_save(plan: Plan, memory_overrides: Mapping[str, Any]) -> bool:
    """Whether what overrides leave where it is fits: activations, but for inputs that go to the host, and what is made
    again. plan: without them."""
    stays = not moves_activations(memory_overrides)
    kept = (
        max(stage.memory.recomputation, stage.memory.loss) + stays * stage.memory.activations for stage in plan.stages
    )
    return max(kept) <= plan.memory_limit


def _may_fit_otherwise(plan: Plan, config: RunConfig) -> bool:
    """Whether other stages have room for what the fullest one has too much of, and `balanced` may give it to them."""
    total = sum(stage.memory.peak for stage in plan.stages)
    return (
        config.partition_method == "balanced"
        and plan.missing_memory > 0
        and total <= len(plan.stages) * plan.memory_limit
    )


def _measure_lack(candidate: Candidate) -> float:
    """Bytes by which a layout exceeds the memory of GPUs and hosts."""
    plan = candidate.plan
    return max(plan.missing_memory, 0) + max(plan.missing_host_memory, 0)


def _global_batch_size(config: RunConfig, world_size: int, num_layers: int) -> int:
    if config.global_batch_size is not None:
        return config.global_batch_size
    return build_layout(config, world_size, num_layers, has_accelerator=True).global_batch_size
