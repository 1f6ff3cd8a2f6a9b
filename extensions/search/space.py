"""The layouts that `plan=search` tries: all that leave the update as it is.

Stages and replicas, micro-batch sizes, recomputation, overrides that save memory for time, and how ranks share layers
(tensor and sequence parallelism), sequences (context parallelism) and experts. The global batch stays what the config
says, so each layout trains the same run.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from errors import UserError
from training.config.incompatible import CheckedConfig, check_together
from training.config.schema import CheckpointMode, ContextParallelMode, RunConfig
from training.costs.hardware import Machine
from training.distributed.topology import build_layout
from training.pipeline.schedules import SCHEDULES
from training.planner.advice import SAVING, UNUSED, Changes, render_override
from training.planner.plan import Plan, plan_resolved
from training.resolution.recomputation import CHOICES, Choice
from training.resolution.resolve import ResolvedModel, resolve_layout
from training.resolution.target import Target

# Levels of recomputation, from keeping all activations to making all of them again, each slower than the one before,
# but that `selective` may have to wait for its host. Of larger groups the first that has room is taken, else the one
# with the least memory.
CHECKPOINTING: tuple[tuple[Choice, ...], ...] = (
    *((choice,) for choice in CHOICES),
    tuple((CheckpointMode.grouped, interval) for interval in (2, 4, 8)),
)
PLAIN = "1f1b"  # the schedule that says whether a layout can fit: no other one takes much less memory
LONG = 8192  # tokens of a sample from which on its sequences are shared as well
MOST_SHARING = 16  # ranks of a sequence
MOST_DIVIDING = 64  # ranks of an expert group


class Sharing(NamedTuple):
    """How ranks share each sequence, the experts and the layers: the keys of these names."""

    context_parallel_size: int
    context_parallel_mode: ContextParallelMode
    expert_parallel_size: int
    tensor_parallel_size: int
    sequence_parallel: bool

    @classmethod
    def of(cls, config: RunConfig) -> Sharing:
        return cls(*(getattr(config, key) for key in cls._fields))

    def apply(self, config: RunConfig) -> RunConfig:
        """Return the config with these keys."""
        return replace(config, **dict[str, Any](self._asdict()))


# The keys that a search varies, or sets so that the global batch stays what it is
VARIED = (
    *("num_stages", *Sharing._fields),
    *("micro_batch_size", "gradient_accumulation_steps", "global_batch_size"),
    *("activation_checkpoint_interval", "activation_checkpoint_mode", "schedule", *UNUSED, "partition_method"),
)


@dataclass(frozen=True)
class Candidate:
    """A layout that was tried."""

    plan: Plan
    config: RunConfig  # that of the search
    is_moved: bool  # whether layers are on other stages than with more memory, and these uneven

    @property
    def keys(self) -> RunConfig:
        """The config of such a run."""
        return self.plan.run.config

    @property
    def sharing(self) -> Sharing:
        return Sharing.of(self.keys)

    @property
    def checkpointing(self) -> Choice:
        return self.keys.activation_checkpoint_mode, int(self.keys.activation_checkpoint_interval)

    @property
    def has_room(self) -> bool:
        """Whether it fits with its layers where they are fastest."""
        return self.plan.fits and not self.is_moved

    @property
    def changed(self) -> dict[str, Any]:
        """The values of the keys in which it differs from the config of the search."""
        values = {key: getattr(self.keys, key) for key in VARIED}
        return {key: value for key, value in values.items() if value != getattr(self.config, key)}

    @property
    def overrides(self) -> tuple[str, ...]:
        """`changed` as it is given on the command line."""
        return tuple(render_override(key, value) for key, value in self.changed.items())


class SharedModels:
    """The model of a search as ranks share it in each way, made once."""

    def __init__(self, config: RunConfig, model: ResolvedModel) -> None:
        self.config, self.model = config, model
        self._known: dict[Sharing, ResolvedModel] = {Sharing.of(config): model}

    def get(self, sharing: Sharing) -> ResolvedModel:
        """Return the model with its layers, sequences and experts shared so. Raises UserError where it cannot be."""
        if sharing not in self._known:
            self._known[sharing] = self.model.share(sharing.apply(self.config))
        return self._known[sharing]


def list_sharings(models: SharedModels, world_size: int, cards_per_node: int) -> list[Sharing]:
    """Return the ways to share that the model, the row's length and the other keys allow, the config's own first: its
    sizes, then powers of two, those that share layers within a node; `auto` as both modes, where a sequence is
    shared."""
    own, (auto, *modes) = Sharing.of(models.config), ContextParallelMode
    tensors = [
        (size, splits_sequence)
        for size in dict.fromkeys([own.tensor_parallel_size, *_list_powers(cards_per_node)])
        for splits_sequence in ((own.sequence_parallel, not own.sequence_parallel) if size > 1 else (False,))
    ]
    powers = _list_powers(MOST_SHARING) if models.config.max_seq_length >= LONG else []
    sequences = [
        (size, mode)
        for size in dict.fromkeys([own.context_parallel_size, *powers])
        for mode in (modes if own.context_parallel_mode is auto and size > 1 else [own.context_parallel_mode])
    ]
    shares = dict.fromkeys([own.expert_parallel_size, *_list_powers(MOST_DIVIDING)])
    found = []
    for (tensor, splits_sequence), (context, mode), experts in itertools.product(tensors, sequences, shares):
        if world_size % (tensor * context) == 0 and world_size % (tensor * experts) == 0:
            with suppress(UserError):
                sharing = Sharing(context, mode, experts, tensor, splits_sequence)
                models.get(sharing)
                found.append(sharing)
    return found or [own]


def list_schedules(ordered: bool) -> list[str]:
    """Return the schedules by name: those that are ordered by trying rules, which takes seconds, or the others."""
    return [name for name, schedule in SCHEDULES.items() if schedule.splits_backward == ordered]


def list_layouts(config: RunConfig, sharings: Sequence[Sharing], num_layers: int) -> list[RunConfig]:
    """Return the keys of each way to share with each number of stages and micro-batch size, in powers of two, that
    divide the ranks and the global batch, under each schedule that no rules order; nothing recomputed, and no memory
    saved. num_layers: of those that a split can separate. Raises UserError where there are none."""
    world_size, total = int(config.world_size), config.global_batch_size
    if total is None:
        total = build_layout(config, world_size, num_layers, has_accelerator=True).global_batch_size
    if isinstance(config.partition_method, list):  # which serves one number of stages only
        config = replace(config, partition_method="balanced")
    config = replace(config, plan=True, global_batch_size=total, gradient_accumulation_steps=None, **UNUSED)
    stages = [size for size in range(1, world_size + 1) if world_size % size == 0]
    found, names = [], list_schedules(ordered=False)
    for sharing, num_stages, name, size in itertools.product(sharings, stages, names, _list_powers(total)):
        keys = replace(sharing.apply(config), num_stages=num_stages, schedule=name, micro_batch_size=size)
        with suppress(UserError):
            build_layout(keys, world_size, num_layers, has_accelerator=True)
            found.append(keys)
    if not found:
        raise UserError(
            f"no split of world_size={world_size} divides global_batch_size={total}; "
            "give a multiple of a divisor of world_size"
        )
    return found


def _list_powers(most: int) -> list[int]:
    return [2**exponent for exponent in range(max(most, 1).bit_length())]


class Planner:
    """Plans the runs of a search, each once. known: those that were planned, by the values of their keys."""

    def __init__(self, models: SharedModels, machine: Machine) -> None:
        self.models, self._machine, self.known = models, machine, dict[tuple[Any, ...], Candidate]()

    def plan(self, keys: RunConfig) -> Candidate:
        """Return the plan of a run; an uneven split, which takes long to find, is looked for only where the fullest
        stage has too much of what others, each of one chunk, have room for. Raises UserError where the run would."""
        values = tuple(getattr(keys, key) for key in VARIED)
        if values not in self.known:
            check_together(CheckedConfig(keys))  # the config of the search has passed all other checks
            model = self.models.get(Sharing.of(keys))
            target = Target(int(keys.world_size), True, self._machine, fills=False, is_planned=True)
            plan = plan_resolved(resolve_layout(model, keys, target), self._machine)
            room = len(plan.stages) * plan.memory_limit - sum(stage.memory.peak for stage in plan.stages)
            is_moved = plan.missing_memory > 0 and room >= 0 and plan.layout.num_chunks == 1
            if is_moved:
                plan = plan_resolved(resolve_layout(model, keys, replace(target, fills=True)), self._machine)
            self.known[values] = Candidate(plan, self.models.config, is_moved)
        return self.known[values]

    def choose(self, keys: RunConfig, choices: Sequence[Choice]) -> Candidate | None:
        """Return the plan with the first of these choices of recomputation that has room, else with the one that takes
        the least memory; None where the run would refuse all."""
        found = []
        for mode, interval in choices:
            with suppress(UserError):
                chosen = replace(keys, activation_checkpoint_mode=mode, activation_checkpoint_interval=interval)
                found.append(self.plan(chosen))
                if found[-1].has_room:
                    return found[-1]
        return min(found, key=lambda candidate: candidate.plan.fullest.memory.peak, default=None)


def list_choices(planner: Planner, base: Candidate, is_too_slow: Callable[[Candidate], bool]) -> Iterator[Candidate]:
    """Yield a layout with more and more recomputation, until there is room or all that is left is too slow; with each
    also the overrides that save memory; nothing where none of these makes it fit. base: the layout with nothing
    recomputed."""
    if not base.plan.fits:  # most layouts of a large model never do, which this shows with few plans
        plain_keys = replace(base.keys, schedule=PLAIN)
        most_saved = (each for choices in CHECKPOINTING[-2:] for each in _list_level(planner, plain_keys, choices))
        if not any(candidate.plan.fits for candidate in most_saved):
            return
    for choices in CHECKPOINTING:
        level = _list_level(planner, base.keys, choices)
        plain = next(level, None)
        if plain is None:
            continue
        if not is_too_slow(plain):
            yield plain
            yield from level
        if plain.has_room and choices[0][0] is not CheckpointMode.selective:
            return


def _list_level(planner: Planner, keys: RunConfig, choices: Sequence[Choice]) -> Iterator[Candidate]:
    """Yield a layout with one of these choices of recomputation, then with each override that it needs besides, but for
    those with more in them than one that made room."""
    plain = planner.choose(keys, choices)
    if plain is None:
        return
    yield plain
    layout, enough = plain.plan.layout, list[Changes]()
    # ZeRO stage 2 sums as often as stage 1 in one micro-batch, and sends less
    in_one = SAVING[:1] if layout.gradient_accumulation_steps == 1 else ()
    for memory_overrides in in_one if plain.has_room else SAVING:
        has_nothing_to_shard = "zero_stage" in memory_overrides and layout.num_weight_replicas == 1
        if has_nothing_to_shard or any(fewer.items() <= memory_overrides.items() for fewer in enough):
            continue
        candidate = planner.choose(replace(keys, **memory_overrides), choices)
        if candidate is not None:
            yield candidate
            enough += [memory_overrides] if candidate.has_room else []
