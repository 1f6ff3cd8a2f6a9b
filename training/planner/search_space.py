"""The layouts that `plan=search` tries: all that leave the update as it is.

Stages and replicas, micro-batch sizes, recomputation, overrides that save memory for time, and how ranks share layers
(tensor and sequence parallelism), sequences (context parallelism) and experts. The global batch stays what the config
says, so each layout trains the same run.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from errors import UserError
from training.config.schema import CheckpointMode, ContextParallelMode, Offload, RunConfig
from training.config.validate import check_config
from training.costs.hardware import Machine
from training.distributed.topology import build_layout
from training.planner.plan import Plan, plan_resolved
from training.resolution.recomputation import CHOICES, Choice
from training.resolution.resolve import ResolvedModel, resolve_layout
from training.resolution.target import Target

# Levels of recomputation, from keeping all activations to making all of them again, each slower than the one before.
# The last takes the same time in groups of any size, so the size with the least memory is taken.
CHECKPOINTING: tuple[tuple[Choice, ...], ...] = (
    *((choice,) for choice in CHOICES[:-1]),
    tuple((CheckpointMode.grouped, interval) for interval in (1, 2, 4, 8)),
)
# Overrides that save memory and cost time, in addition to recomputation: tried where a layout does not fit without. But
# with one micro-batch ZeRO stage 2 sums as often as stage 1, and sends less, so that it is always tried.
SAVING: tuple[dict[str, Any], ...] = (
    {"zero_stage": 2},
    {"offload_optimizer": Offload.cpu},
    {"zero_stage": 3},
    {"zero_stage": 3, "offload_parameters": Offload.cpu},
    {"activation_offload": True},
    {"activation_offload": True, "offload_optimizer": Offload.cpu},
    {"activation_offload": True, "zero_stage": 2},
    {"activation_offload": True, "zero_stage": 3},
)
SAVING_IN_ONE = SAVING[:1]  # of one micro-batch
UNUSED: dict[str, Any] = {
    "offload_optimizer": Offload.none,
    "zero_stage": 1,
    "offload_parameters": Offload.none,
    "activation_offload": False,
}
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
        return replace(config, **self._asdict())


_TOGETHER = (Sharing._fields[:2], Sharing._fields[2:3], Sharing._fields[3:])  # keys that are named all or none


@dataclass(frozen=True)
class Candidate:
    """A layout that was tried."""

    keys: RunConfig  # the config of such a run
    plan: Plan
    memory_overrides: Mapping[str, Any]  # an entry of `SAVING`, by key; empty without one
    named: Sequence[str]  # the keys that `overrides` names
    is_moved: bool  # whether layers are on other stages than with more memory, and these uneven

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
    def overrides(self) -> tuple[str, ...]:
        """The keys that differ from the config's own, as they are given on the command line."""
        return tuple(_render(key, getattr(self.keys, key)) for key in self.named)

    @property
    def saving(self) -> str:
        """`memory_overrides` as text, for a column."""
        return " ".join(_render(key, value) for key, value in self.memory_overrides.items()) or "-"


def _render(key: str, value: Any) -> str:
    return f"{key}={'null' if value is None else str(getattr(value, 'value', value)).lower()}"


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
    own = Sharing.of(models.config)
    auto, *modes = ContextParallelMode
    sequences = _list_powers(MOST_SHARING) if models.config.max_seq_length >= LONG else []
    found = []
    for tensor, splits_sequence, context, mode, experts in itertools.product(
        dict.fromkeys([own.tensor_parallel_size, *_list_powers(cards_per_node)]),
        (own.sequence_parallel, not own.sequence_parallel),
        dict.fromkeys([own.context_parallel_size, *sequences]),
        (auto, *modes),
        dict.fromkeys([own.expert_parallel_size, *_list_powers(MOST_DIVIDING)]),
    ):
        used_modes = modes if own.context_parallel_mode is auto and context > 1 else [own.context_parallel_mode]
        divides = world_size % (tensor * context) == 0 == world_size % (tensor * experts)
        if divides and mode in used_modes and (tensor > 1 or not splits_sequence):
            with suppress(UserError):
                sharing = Sharing(context, mode, experts, tensor, splits_sequence)
                models.get(sharing)
                found.append(sharing)
    return found or [own]


def list_named(sharings: Sequence[Sharing], resplits: bool) -> list[str]:
    """Return the keys that the overrides of a candidate name, of those in `Sharing` the ones that differ: of layers,
    and of sequences, both or none. resplits: whether the config's own split is not used."""
    shared = [
        key
        for keys in _TOGETHER
        if len({tuple(getattr(sharing, key) for key in keys) for sharing in sharings}) > 1
        for key in keys
    ]
    batch = ("micro_batch_size", "gradient_accumulation_steps", "global_batch_size")
    checkpointing = ("activation_checkpoint_interval", "activation_checkpoint_mode")
    split = ["partition_method"] if resplits else []
    return ["num_stages", *shared, *batch, *checkpointing, "schedule", *UNUSED, *split]


def list_layouts(config: RunConfig, world_size: int, num_layers: int) -> Iterator[RunConfig]:
    """Yield the config with each number of stages and micro-batch size that divide the ranks and the global batch;
    micro-batches in powers of two. config: with a global batch, and without `gradient_accumulation_steps`."""
    assert config.global_batch_size is not None
    stages = (size for size in range(1, min(world_size, num_layers) + 1) if world_size % size == 0)
    for num_stages, micro_batch_size in itertools.product(stages, _list_powers(config.global_batch_size)):
        keys = replace(config, num_stages=num_stages, micro_batch_size=micro_batch_size)
        with suppress(UserError):
            build_layout(keys, world_size, num_layers, has_accelerator=True)
            yield keys


class Planner:
    """Plans the runs of a search, each once. named: the keys that the overrides of its candidates name."""

    def __init__(self, models: SharedModels, machine: Machine, named: Sequence[str]) -> None:
        self._models, self._machine, self._named = models, machine, named
        self._known: dict[tuple[Any, ...], Candidate] = {}

    def plan(self, keys: RunConfig, memory_overrides: Mapping[str, Any]) -> Candidate:
        """Return the plan of a run; an uneven split is looked for, which takes long, only where it may save memory.
        Raises UserError where the run would."""
        keys = replace(keys, **memory_overrides)
        values = (*Sharing.of(keys), *(getattr(keys, key) for key in self._named))
        if values not in self._known:
            check_config(keys, has_accelerator=True)
            model, target = self._models.get(Sharing.of(keys)), Target(int(keys.world_size), True, is_planned=True)
            plan = plan_resolved(resolve_layout(model, keys, target), self._machine)
            is_moved = _may_fit_otherwise(plan)
            if is_moved:
                target = replace(target, machine=self._machine)
                plan = plan_resolved(resolve_layout(model, keys, target), self._machine)
            self._known[values] = Candidate(keys, plan, memory_overrides, self._named, is_moved)
        return self._known[values]

    def choose(
        self, keys: RunConfig, choices: Sequence[Choice], memory_overrides: Mapping[str, Any]
    ) -> Candidate | None:
        """Return the plan with that choice of recomputation that takes the least memory; None where the run would
        refuse all."""
        found = []
        for mode, interval in choices:
            with suppress(UserError):
                chosen = replace(keys, activation_checkpoint_mode=mode, activation_checkpoint_interval=interval)
                found.append(self.plan(chosen, memory_overrides))
        return min(found, key=lambda candidate: candidate.plan.fullest.memory.peak, default=None)


def list_choices(planner: Planner, whole: Candidate, is_late: Callable[[Plan], bool]) -> Iterator[Candidate]:
    """Yield a layout with more and more recomputation, until there is room or all that is left is late; with each also
    the overrides that save memory. whole: the layout with nothing recomputed."""
    if not whole.plan.fits:  # most layouts of a large model never do, which this shows with few plans
        plain = planner.choose(replace(whole.keys, schedule=PLAIN), CHECKPOINTING[-1], {})
        most_saved = [plain, *_list_saving(planner, plain, CHECKPOINTING[-1])] if plain else []
        if not any(candidate.plan.fits for candidate in most_saved):
            yield from most_saved
            return
    for choices in CHECKPOINTING:
        plain = planner.choose(whole.keys, choices, {})
        if plain is None:
            continue
        if is_late(plain.plan):
            return
        yield plain
        yield from _list_saving(planner, plain, choices)
        if plain.has_room:
            return


def _list_saving(planner: Planner, plain: Candidate, choices: Sequence[Choice]) -> Iterator[Candidate]:
    """Yield a candidate with each override that it needs and that may save enough, but for those with more in them than
    one that did. choices: of recomputation, among which `plain` has the one that takes the least memory."""
    layout, stages = plain.plan.layout, plain.plan.stages
    enough: list[Mapping[str, Any]] = []
    for memory_overrides in SAVING if not plain.has_room else SAVING_IN_ONE * (layout.gradient_accumulation_steps == 1):
        moves = "activation_offload" in memory_overrides  # the inputs of groups: most in the smallest
        rest = max(
            max(stage.memory.recomputation, stage.memory.loss) + (0 if moves else stage.memory.activations)
            for stage in stages
        )
        if (
            rest > plain.plan.memory_limit
            or ("zero_stage" in memory_overrides and layout.num_weight_replicas == 1)
            or any(fewer.items() <= memory_overrides.items() for fewer in enough)
        ):
            continue
        candidate = planner.choose(plain.keys, choices[:1] if moves else [plain.checkpointing], memory_overrides)
        if candidate is not None:
            yield candidate
            enough += [memory_overrides] * candidate.has_room


def _may_fit_otherwise(plan: Plan) -> bool:
    """Whether stages, each of one chunk, have room for what the fullest one has too much of."""
    total = sum(stage.memory.peak for stage in plan.stages)
    return plan.layout.num_chunks == 1 and plan.missing_memory > 0 and total <= len(plan.stages) * plan.memory_limit


def _list_powers(most: int) -> list[int]:
    return [2**exponent for exponent in range(max(most, 1).bit_length())]
