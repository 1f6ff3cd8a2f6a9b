"""The layouts that `plan=search` tries: all that leave the update as it is.

Stages and replicas, micro-batch sizes, recomputation, overrides that save memory for time, and how ranks share layers
(tensor and sequence parallelism), sequences (context parallelism) and experts. The global batch stays what the config
says, so each layout trains the same run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from errors import UserError
from training.config.schema import CheckpointMode, ContextParallelMode, Offload, RunConfig
from training.distributed.topology import CONTEXT, DATA, PIPE, TENSOR, Layout, Topology, read_sizes
from training.pipeline.schedules import schedule_layout
from training.planner.plan import Plan
from training.resolution.recomputation import CHOICES
from training.resolution.resolve import ResolvedModel

# (mode, interval): from keeping all activations to making all of them again, each slower than the one before. The last
# takes the same time in groups of any size, so the size with the least memory is taken.
CHECKPOINTING = (
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
LONG = 8192  # tokens of a sample from which on its sequences are shared as well
MOST_SHARING = 16  # ranks of a sequence
MOST_DIVIDING = 64  # ranks of an expert group


def shards(memory_overrides: Mapping[str, Any]) -> bool:
    """Return whether overrides shard over replicas more than the optimizer's state."""
    return "zero_stage" in memory_overrides


def moves_activations(memory_overrides: Mapping[str, Any]) -> bool:
    """Return whether overrides keep the inputs of recomputed groups on the host."""
    return "activation_offload" in memory_overrides


class Sharing(NamedTuple):
    """How ranks share each sequence, `context_parallel_size` and `context_parallel_mode`, how many divide experts,
    `expert_parallel_size`, and how they share layers, `tensor_parallel_size` and `sequence_parallel`."""

    size: int
    mode: ContextParallelMode
    experts: int = 1
    tensor: int = 1
    splits_sequence: bool = False

    @classmethod
    def of(cls, config: RunConfig) -> Sharing:
        return cls(
            config.context_parallel_size,
            config.context_parallel_mode,
            config.expert_parallel_size,
            config.tensor_parallel_size,
            config.sequence_parallel,
        )

    def apply(self, config: RunConfig) -> RunConfig:
        """Return the config with these keys."""
        return replace(config, **dict[str, Any](zip(SHARING_KEYS, self, strict=True)))


SHARING_KEYS = (
    "context_parallel_size",
    "context_parallel_mode",
    "expert_parallel_size",
    "tensor_parallel_size",
    "sequence_parallel",
)
_TOGETHER = (SHARING_KEYS[:2], SHARING_KEYS[2:3], SHARING_KEYS[3:])  # named all or none


@dataclass(frozen=True)
class Candidate:
    """A layout that was tried. keys: the config of such a run. checkpointing: mode and interval. memory_overrides: an
    entry of `SAVING`, by key; none where it is empty. tried: what other candidates share differently. resplits: the
    config's own split is not used. is_moved: layers are on other stages than with more memory, and these uneven."""

    keys: RunConfig
    checkpointing: tuple[CheckpointMode, int]
    memory_overrides: Mapping[str, Any]
    plan: Plan
    sharing: Sharing
    tried: frozenset[str] = frozenset()
    resplits: bool = False
    is_moved: bool = False

    @property
    def has_room(self) -> bool:
        """Whether it fits with its layers where they are fastest."""
        return self.plan.fits and not self.is_moved

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
            f"schedule={layout.schedule}",
            *(_render(key, value) for key, value in (UNUSED | dict(self.memory_overrides)).items()),
            *(["partition_method=balanced"] if self.resplits else []),
        )

    def _list_sharing(self) -> list[str]:
        keys = dict(zip(SHARING_KEYS, self.sharing, strict=True))
        return [_render(key, value) for key, value in keys.items() if key in self.tried]

    @property
    def saving(self) -> str:
        """`memory_overrides` as text, for a column."""
        return " ".join(_render(key, value) for key, value in self.memory_overrides.items()) or "-"


def _render(key: str, value: Any) -> str:
    return f"{key}={str(getattr(value, 'value', value)).lower()}"


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
    """Return the ways to share that the model, the row's length and the other keys allow, the config's own first."""
    own = Sharing.of(models.config)
    found = []
    for layers in _list_tensor_sizes(own, world_size, cards_per_node):
        for sharing in _list_sequence_sharings(models.config, layers, world_size):
            for size in _list_expert_sizes(own, world_size // layers.tensor):
                divided = sharing._replace(experts=size)
                if world_size % (divided.size * divided.tensor):
                    continue
                with suppress(UserError):
                    models.get(divided)
                    found.append(divided)
    return list(dict.fromkeys(found)) or [own]


def list_tried(sharings: Sequence[Sharing]) -> frozenset[str]:
    """Return the keys that the ways to share differ in; of layers, and of sequences, both or none."""
    values = {key: {sharing[index] for sharing in sharings} for index, key in enumerate(SHARING_KEYS)}
    return frozenset(key for keys in _TOGETHER if any(len(values[each]) > 1 for each in keys) for key in keys)


def _list_powers(most: int) -> list[int]:
    return [2**exponent for exponent in range(max(most, 1).bit_length())]


def _list_tensor_sizes(sharing: Sharing, world_size: int, cards_per_node: int) -> Iterator[Sharing]:
    """The config's own number of ranks that share layers, then powers of two within a node; each with whole sequences
    between blocks and with parts of them."""
    for size in dict.fromkeys([sharing.tensor, *_list_powers(min(world_size, cards_per_node))]):
        for splits_sequence in dict.fromkeys([sharing.splits_sequence, False, True]) if size > 1 else [False]:
            yield sharing._replace(tensor=size, splits_sequence=splits_sequence)


def _list_expert_sizes(own: Sharing, num_ranks: int) -> list[int]:
    """The config's own number of ranks that divide experts, then powers of two. A layout may have too few replicas for
    them."""
    return list(dict.fromkeys([own.experts, *_list_powers(min(MOST_DIVIDING, num_ranks))]))


def _list_sequence_sharings(config: RunConfig, sharing: Sharing, world_size: int) -> Iterator[Sharing]:
    """The config's own number of ranks that share a sequence, then powers of two, each in the config's mode or, where
    that is `auto`, in both."""
    powers = _list_powers(min(MOST_SHARING, world_size // sharing.tensor)) if config.max_seq_length >= LONG else []
    auto, *others = ContextParallelMode
    for size in dict.fromkeys([sharing.size, *powers]):
        for mode in others if sharing.mode is auto and size > 1 else [sharing.mode]:
            yield sharing._replace(size=size, mode=mode)


def list_layouts(config: RunConfig, sharing: Sharing, world_size: int, num_layers: int, total: int) -> Iterator[Layout]:
    """Yield (stages, micro-batches) that divide the ranks and the global batch, under 1F1B; micro-batches in powers of
    two. total: samples of the global batch."""
    given = read_sizes(config) | {CONTEXT: sharing.size, TENSOR: sharing.tensor}
    del given[PIPE]
    ranks = world_size // math.prod(given.values())
    for num_stages in range(1, min(ranks, num_layers) + 1):
        replicas = ranks // num_stages
        if ranks % num_stages or total % replicas or replicas * sharing.size % sharing.experts:
            continue
        topology = Topology.of(world_size, experts=sharing.experts, **given, **{PIPE: num_stages})
        for micro_batch_size in _list_powers(total // replicas):
            if total // replicas % micro_batch_size == 0:
                yield Layout(topology, micro_batch_size, total // (micro_batch_size * topology.size(DATA)))


def list_schedules(layout: Layout, config: RunConfig, names: list[str], num_layers: int) -> Iterator[Layout]:
    """Yield the layout under each of these schedules that can run it; one stage has no bubble to fill."""
    for name in names if layout.num_stages > 1 else []:
        with suppress(UserError):
            yield schedule_layout(layout, replace(config, schedule=name), num_layers)


def build_keys(
    config: RunConfig,
    layout: Layout,
    sharing: Sharing,
    checkpointing: tuple[CheckpointMode, int],
    memory_overrides: Mapping[str, Any],
) -> RunConfig:
    """Return the config of a run that is laid out so."""
    mode, interval = checkpointing
    return replace(
        sharing.apply(config),
        num_stages=layout.num_stages,
        micro_batch_size=layout.micro_batch_size,
        gradient_accumulation_steps=None,
        global_batch_size=layout.global_batch_size,
        activation_checkpoint_mode=mode,
        activation_checkpoint_interval=interval,
        schedule=layout.schedule,
        **(UNUSED | dict(memory_overrides)),
    )
