"""`plan=search`: every split of the ranks into stages and replicas, every micro-batch size and way of checkpointing,
best first; where the GPU is too small, with overrides that save memory and cost time, such as ZeRO's stages.

The global batch stays what the config says, so each found layout trains the same run; `tensor_parallel_size` stays too,
and so does the optimizer: nothing that is tried changes a gradient or an update. Where samples are long, other numbers
of ranks that share each sequence are tried, and of a mixture other numbers of ranks that divide experts. All of them
run under 1F1B, and the schedule that the config asks for; the best few under every other one too. With
`context_parallel_mode=auto` both ways to share a sequence are tried.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from errors import UserError
from models.sharding.expert_parallel import check_expert_parallel
from training.config.incompatible import Run, check_together
from training.config.schema import CheckpointMode, ContextParallelMode, Offload, RunConfig
from training.config.validate import check_config
from training.costs.hardware import Machine
from training.distributed.topology import CONTEXT, DATA, PIPE, Layout, Topology, build_layout, read_sizes
from training.pipeline.schedules import SCHEDULES, schedule_layout
from training.planner.plan import Plan, plan_resolved
from training.resolution.recomputation import CHOICES
from training.resolution.resolve import ResolvedModel, place_layers, resolve_layout
from training.resolution.sequences import check_run_sequences
from training.resolution.target import Target

# (mode, interval): from keeping all activations to making all of them again. The last takes the same time in groups of
# any size, so the size with the least memory is taken. Where two are equally fast, the first is.
CHECKPOINTING = (
    *((choice,) for choice in CHOICES[:-1]),
    tuple((CheckpointMode.grouped, interval) for interval in (1, 2, 4, 8)),
)
# Overrides that save memory and cost time, in addition to recomputation. The first two are always tried; the others
# where the first does not fit, since each is slower. But with one micro-batch ZeRO stage 2 sums as often as stage 1,
# and sends less.
ALWAYS: tuple[dict[str, Any], ...] = ({}, {"offload_optimizer": Offload.cpu})
SAVING: tuple[dict[str, Any], ...] = (
    {"zero_stage": 2},
    {"zero_stage": 3},
    {"zero_stage": 3, "offload_parameters": Offload.cpu},
    {"activation_offload": True},
    {"activation_offload": True, "offload_optimizer": Offload.cpu},
    {"activation_offload": True, "zero_stage": 2},
    {"activation_offload": True, "zero_stage": 3},
)
UNUSED: dict[str, Any] = {
    "offload_optimizer": Offload.none,
    "zero_stage": 1,
    "offload_parameters": Offload.none,
    "activation_offload": False,
}
SHOWN = 10  # layouts
FINALISTS = 4  # that are tried under other schedules
LONG = 8192  # tokens of a sample from which on its sequences are shared as well
MOST_SHARING = 16  # ranks of a sequence
MOST_DIVIDING = 64  # ranks of an expert group
MOST_PASSES = 1024  # stages x micro-batches that an order is computed for here


class Sharing(NamedTuple):
    """How ranks share each sequence, `context_parallel_size` and `context_parallel_mode`, and how many divide experts,
    `expert_parallel_size`."""

    size: int
    mode: ContextParallelMode
    experts: int = 1

    def apply(self, config: RunConfig) -> RunConfig:
        """Return the config with these keys."""
        return replace(
            config,
            context_parallel_size=self.size,
            context_parallel_mode=self.mode,
            expert_parallel_size=self.experts,
        )


@dataclass(frozen=True)
class Candidate:
    """A layout that was tried. keys: the config of such a run. checkpointing: mode and interval. memory_overrides: an
    entry of `ALWAYS` or `SAVING`, by key. tried: what other candidates share differently. resplits: the config's own
    split is not used."""

    keys: RunConfig
    checkpointing: tuple[CheckpointMode, int]
    memory_overrides: Mapping[str, Any]
    plan: Plan
    sharing: Sharing
    tried: frozenset[str] = frozenset()
    resplits: bool = False

    @property
    def overrides(self) -> tuple[str, ...]:
        """The keys that differ from the config's own."""
        layout, (mode, interval) = self.plan.layout, self.checkpointing
        return (
            f"num_stages={layout.num_stages}",
            *self._list_sharing(),
            f"micro_batch_size={layout.micro_batch_size}",
            "gradient_accumulation_steps=null",
            f"global_batch_size={layout.global_batch_size}",
            f"activation_checkpoint_interval={interval}",
            f"activation_checkpoint_mode={mode.value}",
            f"offload_optimizer={(UNUSED | dict(self.memory_overrides))['offload_optimizer'].value}",
            f"schedule={layout.schedule}",
            *(
                _render(key, value)
                for key, value in (UNUSED | dict(self.memory_overrides)).items()
                if key != "offload_optimizer"
            ),
            *(["partition_method=balanced"] if self.resplits else []),
        )

    def _list_sharing(self) -> list[str]:
        keys = dict(zip(_SHARING_KEYS, self.sharing, strict=True))
        return [_render(key, value) for key, value in keys.items() if key in self.tried]

    @property
    def saving(self) -> str:
        """`memory_overrides` as text, for a column."""
        return " ".join(_render(key, value) for key, value in self.memory_overrides.items()) or "-"


_SHARING_KEYS = ("context_parallel_size", "context_parallel_mode", "expert_parallel_size")


def _render(key: str, value: Any) -> str:
    return f"{key}={str(getattr(value, 'value', value)).lower()}"


def search_plans(config: RunConfig, model: ResolvedModel, machine: Machine) -> list[Candidate]:
    """Return all layouts: first those that fit, by tokens/s, then the others by the memory that they lack.

    Raises UserError when the global batch cannot be cut for any split.
    """
    search = _Search(config, model, machine)
    found = [
        candidate
        for sharing in search.sharings
        for layout in search.list_layouts(sharing)
        for candidate in search.try_layout(layout, sharing)
    ]
    if not found:
        raise UserError(
            f"no split of world_size={config.world_size} divides global_batch_size={search.global_batch_size}; "
            "give a multiple of a divisor of world_size"
        )
    found.sort(key=_rank)
    return search.drop_refused(sorted([*found, *search.try_other_schedules(found)], key=_rank))


class _Search:
    def __init__(self, config: RunConfig, model: ResolvedModel, machine: Machine) -> None:
        assert config.world_size is not None
        # A list of layers per stage serves one number of stages only
        self._resplits = isinstance(config.partition_method, list)
        self._config = replace(config, partition_method="balanced") if self._resplits else config
        self._model, self._machine, self._num_layers = model, machine, len(model.layers)
        self._world_size = config.world_size
        self.global_batch_size = _global_batch_size(config, self._world_size, len(model.layers))
        self.sharings = list_sharings(config, model, self._world_size)
        self._tried = _list_tried(self.sharings)
        self._models = {sharing: self._share(sharing) for sharing in self.sharings}

    def _share(self, sharing: Sharing) -> ResolvedModel:
        """The model with its sequences and experts shared in this way."""
        keys = sharing.apply(self._config)
        return self._model if keys == self._config else self._model.share(keys)

    def drop_refused(self, ranked: Sequence[Candidate]) -> list[Candidate]:
        """Return the candidates without those, among the best that are shown, whose keys the run would refuse. Raises
        the UserError of the first where it would refuse all of them."""
        accepted: list[Candidate] = []
        refusals = []
        for number, candidate in enumerate(ranked):
            if len(accepted) == SHOWN:
                return [*accepted, *ranked[number:]]
            try:
                keys = replace(candidate.keys, plan=True)
                check_config(keys, has_accelerator=True)
                target = Target(self._world_size, True, self._machine, is_planned=True)
                resolve_layout(self._models[candidate.sharing], keys, target)
                accepted.append(candidate)
            except UserError as error:
                refusals.append(error)
        if not accepted:
            raise refusals[0]
        return accepted

    def list_layouts(self, sharing: Sharing) -> Iterator[Layout]:
        """Yield the layouts to try, under 1F1B and the schedule that the config asks for."""
        total = self.global_batch_size
        given = {axis: size for axis, size in read_sizes(self._config).items() if axis != PIPE}
        given[CONTEXT] = sharing.size
        replica = self._world_size // math.prod(given.values())
        for num_stages, micro_batch_size in _list_layouts(replica, self._num_layers, total):
            if replica // num_stages * sharing.size % sharing.experts:
                continue
            topology = Topology.of(self._world_size, experts=sharing.experts, **given, **{PIPE: num_stages})
            layout = Layout(topology, micro_batch_size, total // (micro_batch_size * topology.size(DATA)))
            yield from _list_schedules(layout, self._config, self._num_layers)

    def try_layout(self, layout: Layout, sharing: Sharing) -> Iterator[Candidate]:
        """Yield the layout with every way of checkpointing, with and without offloading, and with more memory overrides
        where that does not fit."""
        for choices in CHECKPOINTING:
            found = [
                candidate
                for memory_overrides in ALWAYS
                if (candidate := self._try_each(layout, sharing, choices, memory_overrides))
            ]
            yield from found
            fits = any(candidate.plan.fits for candidate in found if not candidate.memory_overrides)
            more = SAVING if not fits else SAVING[:1] if layout.gradient_accumulation_steps == 1 else ()
            yield from (
                candidate
                for memory_overrides in more
                if (candidate := self._try_each(layout, sharing, choices, memory_overrides))
            )

    def _try_each(
        self,
        layout: Layout,
        sharing: Sharing,
        choices: Sequence[tuple[CheckpointMode, int]],
        memory_overrides: Mapping[str, Any],
    ) -> Candidate | None:
        """The choice that takes the least memory; None where the run cannot have `memory_overrides`, or they save
        nothing."""
        if "zero_stage" in memory_overrides and layout.num_weight_replicas == 1:
            return None
        if any(memory_overrides == tried for tried in SAVING):
            choices = [choice for choice in choices if self._goes_together(layout, sharing, choice, memory_overrides)]
        tried = [self._try(layout, sharing, *choice, memory_overrides) for choice in choices]
        return min(tried, key=lambda candidate: candidate.plan.fullest.memory.peak, default=None)

    def _goes_together(
        self,
        layout: Layout,
        sharing: Sharing,
        checkpointing: tuple[CheckpointMode, int],
        memory_overrides: Mapping[str, Any],
    ) -> bool:
        keys = replace(self._keys(layout, sharing, *checkpointing, memory_overrides), plan=True)
        with suppress(UserError):
            check_config(keys, has_accelerator=True)
            check_together(Run(keys))
            return True
        return False

    def try_other_schedules(self, ranked: Sequence[Candidate]) -> Iterator[Candidate]:
        """Yield the best that fit under the schedules that have not been tried: ordering the passes of one takes
        seconds, and changes little about what fits."""
        known = {candidate.plan.layout.schedule for candidate in ranked}
        best = (candidate for candidate in ranked if candidate.plan.fits and candidate.plan.layout.num_stages > 1)
        for candidate, name in itertools.product(itertools.islice(best, FINALISTS), SCHEDULES):
            keys = replace(self._config, schedule=name)
            with suppress(UserError):
                check_together(Run(keys))
                layout = schedule_layout(candidate.plan.layout, keys, self._num_layers)
                if name not in known and layout.num_stages * layout.gradient_accumulation_steps <= MOST_PASSES:
                    yield self._try(layout, candidate.sharing, *candidate.checkpointing, candidate.memory_overrides)

    def _keys(
        self, layout: Layout, sharing: Sharing, mode: CheckpointMode, interval: int, memory_overrides: Mapping[str, Any]
    ) -> RunConfig:
        return replace(
            sharing.apply(self._config),
            num_stages=layout.num_stages,
            micro_batch_size=layout.micro_batch_size,
            gradient_accumulation_steps=None,
            global_batch_size=layout.global_batch_size,
            activation_checkpoint_mode=mode,
            activation_checkpoint_interval=interval,
            schedule=layout.schedule,
            **(UNUSED | dict(memory_overrides)),
        )

    def _try(
        self, layout: Layout, sharing: Sharing, mode: CheckpointMode, interval: int, memory_overrides: Mapping[str, Any]
    ) -> Candidate:
        """Plan the layout; look for an uneven split, which takes long, only where it may save memory."""
        keys, model = self._keys(layout, sharing, mode, interval, memory_overrides), self._models[sharing]
        target = Target(self._world_size, True, is_planned=True)
        plan = plan_resolved(place_layers(model, keys, layout, target), self._machine)
        if layout.num_chunks == 1 and _may_fit_otherwise(plan, self._config):
            target = replace(target, machine=self._machine)
            plan = plan_resolved(place_layers(model, keys, layout, target), self._machine)
        return Candidate(keys, (mode, interval), memory_overrides, plan, sharing, self._tried, self._resplits)


def _list_tried(sharings: Sequence[Sharing]) -> frozenset[str]:
    """Return the keys that the candidates differ in; of sequences both or none."""
    experts = {sharing.experts for sharing in sharings}
    sequences = {(sharing.size, sharing.mode) for sharing in sharings}
    return frozenset(_SHARING_KEYS[:2] * (len(sequences) > 1) + _SHARING_KEYS[2:] * (len(experts) > 1))


def list_sharings(config: RunConfig, model: ResolvedModel, world_size: int) -> list[Sharing]:
    """Return each way to share sequences with each way to divide experts."""
    return [
        sharing._replace(experts=experts)
        for sharing in _list_sequence_sharings(config, model, world_size)
        for experts in _list_expert_sizes(config, model, world_size)
    ]


def _list_expert_sizes(config: RunConfig, model: ResolvedModel, world_size: int) -> list[int]:
    """The numbers of ranks that may divide experts, by the model and the other keys: the config's own, then powers of
    two. A layout may have too few replicas for them."""
    own, most = config.expert_parallel_size, min(MOST_DIVIDING, world_size // config.tensor_parallel_size)
    found = []
    for size in dict.fromkeys([own, *(2**exponent for exponent in range(most.bit_length()))]):
        keys = replace(config, expert_parallel_size=size)
        with suppress(UserError):
            check_together(Run(keys))
            check_expert_parallel(model.architecture, model.layers, size)
            found.append(size)
    return found or [own]


def _list_sequence_sharings(config: RunConfig, model: ResolvedModel, world_size: int) -> list[Sharing]:
    """The ways to share a sequence that the model, the row's length and the other keys allow: over the config's own
    number of ranks, then powers of two, each in the config's mode or, where that is `auto`, in both."""
    own = config.context_parallel_size
    most = min(MOST_SHARING, world_size // config.tensor_parallel_size)
    powers = [2**exponent for exponent in range(most.bit_length())] if config.max_seq_length >= LONG else []
    found = []
    for size in dict.fromkeys([own, *powers]):
        for mode in _list_modes(config, size):
            keys = replace(config, context_parallel_size=size, context_parallel_mode=mode)
            with suppress(UserError):
                check_together(Run(keys))
                check_run_sequences(keys, model.architecture, model.layers)
                if world_size % (size * config.tensor_parallel_size) == 0:
                    found.append(Sharing(size, mode))
    return found or [Sharing(own, config.context_parallel_mode)]


def _list_modes(config: RunConfig, size: int) -> list[ContextParallelMode]:
    auto, *others = ContextParallelMode
    return others if config.context_parallel_mode is auto and size > 1 else [config.context_parallel_mode]


def _list_schedules(layout: Layout, config: RunConfig, num_layers: int) -> Iterator[Layout]:
    """The layout under 1F1B and under the schedule that the config asks for, where that can run it; one stage has no
    bubble to fill."""
    for name in dict.fromkeys(("1f1b", config.schedule if layout.num_stages > 1 else "1f1b")):
        with suppress(UserError):
            yield schedule_layout(layout, replace(config, schedule=name), num_layers)


def _may_fit_otherwise(plan: Plan, config: RunConfig) -> bool:
    """Whether other stages have room for what the fullest one has too much of, and `balanced` may give it to them."""
    total = sum(stage.memory.peak for stage in plan.stages)
    return (
        config.partition_method == "balanced"
        and plan.missing_memory > 0
        and total <= len(plan.stages) * plan.memory_limit
    )


def _rank(candidate: Candidate) -> tuple[bool, float]:
    plan = candidate.plan
    return (
        (False, -plan.tokens_per_second)
        if plan.fits
        else (True, max(plan.missing_memory, 0) + max(plan.missing_host_memory, 0))
    )


def _global_batch_size(config: RunConfig, world_size: int, num_layers: int) -> int:
    if config.global_batch_size is not None:
        return config.global_batch_size
    return build_layout(config, world_size, num_layers, has_accelerator=True).global_batch_size


def _list_layouts(world_size: int, num_layers: int, global_batch_size: int) -> Iterator[tuple[int, int]]:
    """(num_stages, micro_batch_size) that divide the ranks and the global batch; micro-batches in powers of two.

    world_size: in groups that share layers.
    """
    for num_stages in range(1, min(world_size, num_layers) + 1):
        dp_size = world_size // num_stages
        if world_size % num_stages or global_batch_size % dp_size:
            continue
        micro_batch_size = 1
        while global_batch_size // dp_size % micro_batch_size == 0:
            yield num_stages, micro_batch_size
            micro_batch_size *= 2
