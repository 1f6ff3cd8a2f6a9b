"""The axes along which ranks are laid out, and the arithmetic of ranks and batches on them.

`AXES` is the only table: all code that computes with ranks uses a `Topology`, so a new axis is one more line in it. The
outermost axis comes first: with pipe, data and tensor, rank = (stage_id * data size + data index) * tensor size +
tensor index, as in DeepSpeed's `PipeModelDataParallelTopology`. So ranks that share layers, which exchange most, are
neighbours, and those that share a sequence are next.

Experts are divided among ranks that otherwise have the same weights: expert groups are consecutive ranks along all axes
that do not split weights, and so no axis of their own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch.distributed as dist

from errors import UserError
from training.config.schema import RunConfig

PIPE, DATA, CONTEXT, TENSOR = "pipe", "data", "context", "tensor"
# Where bytes are counted by axis: the ranks of an expert group; context ranks of which each sends to the next
EXPERTS, RING = "experts", "ring"


@dataclass(frozen=True)
class Axis:
    """An axis of parallelism.

    size_key: the config key of its size; None for the one whose size follows from the number of ranks. splits_weights:
    its ranks have different weights (other layers, other shards); otherwise they have the same, and gradients are
    summed.
    """

    name: str
    size_key: str | None
    label: str  # in a description: tp2
    splits_weights: bool


# Axes whose ranks should be on one host -> what they send each other
_WITHIN_HOSTS = {TENSOR: "its activations", CONTEXT: "queries, keys, values and outputs"}

AXES = (
    Axis(PIPE, "num_stages", "pp", splits_weights=True),
    Axis(DATA, None, "dp", splits_weights=False),
    Axis(CONTEXT, "context_parallel_size", "cp", splits_weights=False),
    Axis(TENSOR, "tensor_parallel_size", "tp", splits_weights=True),
)


@dataclass(frozen=True)
class Topology:
    """The grid of all ranks. sizes: of each axis. num_expert_shares: ranks of an expert group, each with a share of the
    experts of its layers. Methods that take several axes ignore their order."""

    axes: tuple[Axis, ...]
    sizes: tuple[int, ...]
    num_expert_shares: int = 1

    @classmethod
    def of(cls, world_size: int, *, experts: int = 1, **sizes: int) -> Topology:
        """Build the topology of `world_size` ranks. experts: ranks of an expert group. sizes: by axis name, 1 by
        default; that of `data` is derived."""
        given = {axis.name for axis in AXES if axis.size_key}
        derived, rest = divmod(world_size, math.prod(sizes.values()))
        assert rest == 0 and sizes.keys() <= given, f"{world_size} ranks, {sizes}"
        topology = cls(AXES, tuple(sizes.get(axis.name, 1) if axis.size_key else derived for axis in AXES), experts)
        assert topology.num_weight_replicas % experts == 0, f"{world_size} ranks, {sizes}, {experts} for experts"
        return topology

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return math.prod(self.sizes)

    @property
    def weight_replica_axes(self) -> tuple[str, ...]:
        """The axes along which ranks have the same weights: gradients are summed and ZeRO partitions over them."""
        return tuple(axis.name for axis in self.axes if not axis.splits_weights)

    @property
    def num_weight_replicas(self) -> int:
        """The number of ranks with the same weights, but for those of experts."""
        return self.size(*self.weight_replica_axes)

    def split_replicas(self, size: int) -> tuple[list[list[int]], list[list[int]]]:
        """Return (groups of `size` neighbours with the same weights, groups of ranks with the same place in those)."""
        alike = self.groups(*self.weight_replica_axes)
        own = [ranks[first : first + size] for ranks in alike for first in range(0, len(ranks), size)]
        return own, [ranks[first::size] for ranks in alike for first in range(size)]

    def expert_share(self, rank: int) -> int:
        """Return which share of the experts of its layers a rank has."""
        return self.index(rank, *self.weight_replica_axes) % self.num_expert_shares

    def size(self, *axes: str) -> int:
        """Return the number of ranks that differ in these axes alone."""
        return math.prod(size for axis, size in zip(self.axes, self.sizes, strict=True) if axis.name in axes)

    def others(self, *axes: str) -> tuple[str, ...]:
        """Return the names of all axes but these."""
        return tuple(axis.name for axis in self.axes if axis.name not in axes)

    def index(self, rank: int, *axes: str) -> int:
        """Return the coordinate of a rank on an axis; on several axes, its index among the ranks that differ in these
        alone."""
        index, inner = 0, 1
        for axis, size in zip(reversed(self.axes), reversed(self.sizes), strict=True):
            rank, coordinate = divmod(rank, size)
            if axis.name in axes:
                index, inner = index + coordinate * inner, inner * size
        return index

    @cache  # a search of layouts asks for the same ones again and again
    def groups(self, *axes: str) -> list[list[int]]:
        """Return the groups of ranks that differ in these axes alone; groups and ranks are in the order of ranks."""
        found: dict[int, list[int]] = {}
        others = self.others(*axes)
        for rank in range(self.world_size):
            found.setdefault(self.index(rank, *others), []).append(rank)
        return list(found.values())

    def neighbour(self, rank: int, axis: str, step: int = 1) -> int:
        """Return the rank that is `step` further along the axis, as a ring."""
        number = [known.name for known in self.axes].index(axis)
        here = self.index(rank, axis)
        return rank + ((here + step) % self.sizes[number] - here) * math.prod(self.sizes[number + 1 :])

    def describe(self, notes: Mapping[str, str]) -> str:
        """Return a description such as "tp2 x pp2 x dp4"; only stages and replicas are shown at size 1. notes: text
        after an axis, by its name."""
        always = [axis for axis in self.axes if axis.name in (PIPE, DATA)]
        others = [axis for axis in reversed(self.axes) if axis not in always and self.size(axis.name) > 1]
        product = " x ".join(
            f"{axis.label}{self.size(axis.name)}{notes.get(axis.name, '')}" for axis in others + always
        )
        return product + (f", ep{self.num_expert_shares}" if self.num_expert_shares > 1 else "")


def _find_axis(name: str) -> Axis:
    return next(axis for axis in AXES if axis.name == name)


def join_group(topology: Topology, *axes: str) -> dist.ProcessGroup:
    """Create the process group of this rank and of those that differ from it in these axes alone. All ranks call it."""
    return dist.new_subgroups_by_enumeration(topology.groups(*axes))[0]


def read_sizes(config: RunConfig) -> dict[str, int]:
    """Return the size of each axis that has a config key, by name."""
    return {axis.name: getattr(config, axis.size_key) for axis in AXES if axis.size_key}


def name_sizes(sizes: Mapping[str, int]) -> str:
    """Return keys and values, such as "num_stages=2 x tensor_parallel_size=2"; of axes of size 1 only stages."""
    shown = [axis for axis in AXES if axis.name in sizes and (sizes[axis.name] > 1 or axis.name == PIPE)]
    return " x ".join(f"{axis.size_key}={sizes[axis.name]}" for axis in shown)


@dataclass(frozen=True)
class Layout:
    """The topology of the ranks, and the samples of a step.

    global_batch_size = micro_batch_size * gradient_accumulation_steps * dp_size.

    schedule: its name. num_chunks: chunks of layers per rank. max_in_flight: an input of the schedules that
    `training/pipeline/schedules.py` sets it for. pass_times: nanoseconds of each chunk's passes, by which passes and
    exchanges are ordered; the same on all ranks. sharding_parallel_size: see `num_shards`.
    """

    topology: Topology
    micro_batch_size: int
    gradient_accumulation_steps: int
    num_chunks: int = 1
    schedule: str = "1f1b"
    max_in_flight: int | None = None
    pass_times: tuple[Any, ...] = ()
    sharding_parallel_size: int | None = None

    @property
    def world_size(self) -> int:
        return self.topology.world_size

    @property
    def num_stages(self) -> int:
        return self.topology.size(PIPE)

    @property
    def tensor_parallel_size(self) -> int:
        return self.topology.size(TENSOR)

    @property
    def context_parallel_size(self) -> int:
        return self.topology.size(CONTEXT)

    @property
    def dp_size(self) -> int:
        """The number of replicas that read samples of their own."""
        return self.topology.size(DATA)

    @property
    def num_weight_replicas(self) -> int:
        """The number of ranks with the same weights, but for those of experts: the size of DeepSpeed's `data` axis."""
        return self.topology.num_weight_replicas

    @property
    def num_shards(self) -> int:
        """The number of parts into which ZeRO partitions: the replicas, or those of one shard group."""
        return self.sharding_parallel_size or self.num_weight_replicas

    @property
    def ranks_per_stage(self) -> int:
        return self.topology.size(*self.topology.others(PIPE))

    @property
    def global_batch_size(self) -> int:
        return self.micro_batch_size * self.gradient_accumulation_steps * self.dp_size

    def stage_id(self, rank: int) -> int:
        return self.topology.index(rank, PIPE)

    def dp_rank(self, rank: int) -> int:
        return self.topology.index(rank, DATA)

    def list_stage_ranks(self, stage_id: int) -> list[int]:
        return self.topology.groups(*self.topology.others(PIPE))[stage_id]

    def describe_placement(
        self, hosts: list[str], boundaries: Sequence[tuple[int, int]], sent: Mapping[str, float] | None = None
    ) -> str:
        """Describe which stages are on which host, and what crosses hosts. hosts: the host of each rank. boundaries:
        the pairs of stages that send to each other. sent: bytes that a rank sends in a step over each axis, where they
        are known."""
        ranks = range(self.world_size)
        stages = {
            host: sorted({self.stage_id(rank) for rank in ranks if hosts[rank] == host})
            for host in dict.fromkeys(hosts)
        }
        text = "; ".join(f"{host}: stage {_ranges(on_host)}" for host, on_host in stages.items())
        pairs = [pair for stages in boundaries for pair in zip(*map(self.list_stage_ranks, stages), strict=True)]
        crossing = sum(hosts[rank] != hosts[peer] for rank, peer in pairs)
        apart = sum(_spans_hosts(self.list_stage_ranks(stage), hosts) for stage in range(self.num_stages))
        text += (
            f"; {crossing} of {len(pairs)} stage boundaries and the replicas of {apart} of {self.num_stages} stages "
            "cross hosts"
        )
        counted = sent or {}
        by_axis = {TENSOR: counted.get(TENSOR, 0), CONTEXT: counted.get(CONTEXT, 0) + counted.get(RING, 0)}
        crossings = (self._warn_of_crossing(axis, what, hosts, by_axis[axis]) for axis, what in _WITHIN_HOSTS.items())
        return text + "".join(crossings) + self._warn_of_experts(hosts, counted.get(EXPERTS, 0))

    def _warn_of_experts(self, hosts: list[str], sent: float) -> str:
        """A warning where expert groups span hosts, else empty."""
        own, _ = self.topology.split_replicas(self.topology.num_expert_shares)
        groups = [group for group in own if _spans_hosts(group, hosts)]
        if not groups:
            return ""
        return (
            f"; warning: {len(groups)} expert groups cross hosts, the first of ranks {_ranges(groups[0])}: each layer "
            "then sends rows of its experts over the network four times a micro-batch"
            + (f", {sent / 2**30:,.2f} GiB of a rank a step" if sent else "")
            + ". Give an expert_parallel_size that divides the ranks of each host that have the same layers"
        )

    def _warn_of_crossing(self, axis: str, what: str, hosts: list[str], sent: float) -> str:
        """A warning where groups of the axis span hosts, else empty. what: the data that they send."""
        groups = [group for group in self.topology.groups(axis) if _spans_hosts(group, hosts)]
        if not groups:
            return ""
        inner = [each for each in (CONTEXT, TENSOR) if self.topology.size(each) > 1]
        inner = inner[inner.index(axis) :]
        product = " x ".join(f"{_find_axis(each).size_key}={self.topology.size(each)}" for each in inner)
        fits = self.topology.size(*inner) <= max(map(hosts.count, hosts))
        key = _find_axis(axis).size_key
        return (
            f"; warning: {len(groups)} {axis}-parallel groups cross hosts, the first of ranks {_ranges(groups[0])}: "
            f"each layer then sends {what} over the network four times a micro-batch"
            + (f", {sent / 2**30:,.2f} GiB of a rank a step" if sent else "")
            + (f". Start a multiple of {product} ranks on each host, or give" if fits else ". Give")
            + f" a smaller {key} and more num_stages"
        )

    def name_rank(self, rank: int) -> str:
        """Return a name such as "5 (pp1 cp0 tp1)": the coordinate on each axis with several ranks, where there are
        several such axes."""
        axes = [axis for axis in AXES if self.topology.size(axis.name) > 1]
        places = " ".join(f"{axis.label}{self.topology.index(rank, axis.name)}" for axis in axes)
        return f"{rank} ({places})" if len(axes) > 1 else str(rank)

    def describe_ranks(self) -> str:
        return "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"

    def describe(self) -> str:
        chunks = {PIPE: f" ({self.num_chunks} chunks each)"} if self.num_chunks > 1 else {}
        return (
            f"{self.topology.describe(chunks)} = {self.describe_ranks()}; global batch {self.global_batch_size} = "
            f"micro-batch {self.micro_batch_size} x accumulation {self.gradient_accumulation_steps} x dp {self.dp_size}"
        )


def build_layout(config: RunConfig, world_size: int, num_layers: int, has_accelerator: bool) -> Layout:
    """Build the layout from the config's keys, without its schedule (`training.pipeline.schedules.schedule_layout`).

    Raises UserError, naming the key, where keys contradict each other or the number of ranks.
    """
    sizes = read_sizes(config)
    for axis in AXES:
        if axis.size_key and sizes[axis.name] < 1:
            raise UserError(f"{axis.size_key}={sizes[axis.name]}: at least 1")
    if sizes[PIPE] > num_layers:
        raise UserError(
            f"num_stages={sizes[PIPE]} exceeds the model's {num_layers} layers (embedding, norm and head count as "
            f"one each); set num_stages to {num_layers} or less"
        )
    replica = math.prod(sizes.values())
    if world_size % replica:
        product = name_sizes(sizes) + (f" = {replica}" if replica > sizes[PIPE] else "")
        raise UserError(
            f"{product} does not divide the number of started ranks, {world_size}; "
            f"{_ranks_to_start(replica, world_size, has_accelerator)}"
        )
    experts, num_replicas = config.expert_parallel_size, world_size // (sizes[PIPE] * sizes[TENSOR])
    if num_replicas % experts:
        raise UserError(
            f"expert_parallel_size={experts} does not divide the {num_replicas} ranks that have the same layers (the "
            "replicas x context_parallel_size), among which experts are divided; give a divisor of that"
        )
    topology = Topology.of(world_size, experts=experts, **sizes)
    micro_batch_size, accumulation = _batch_arithmetic(config, topology.size(DATA))
    layout = Layout(topology, micro_batch_size, accumulation, sharding_parallel_size=config.sharding_parallel_size)
    if layout.num_weight_replicas % layout.num_shards:
        raise UserError(
            f"sharding_parallel_size={layout.num_shards} does not divide the {layout.num_weight_replicas} ranks that "
            "have the same weights; give a divisor of that, such as the ranks of one host, or null for all of them"
        )
    return layout


def _ranks_to_start(replica: int, world_size: int, has_accelerator: bool) -> str:
    """replica: the number of ranks of one replica."""
    fitting = math.ceil(world_size / replica) * replica
    command = f"start it with `deepspeed --num_gpus {fitting} trainer_base_ds_mp.py ...`"
    if has_accelerator:
        return command + " or change num_stages"
    return command + " (without GPUs the launcher starts one rank unless --num_gpus says how many processes)"


def _batch_arithmetic(config: RunConfig, dp_size: int) -> tuple[int, int]:
    """(micro_batch_size, gradient_accumulation_steps) from any two of the three batch keys."""
    micro, accumulation, total = config.micro_batch_size, config.gradient_accumulation_steps, config.global_batch_size
    given = {"micro_batch_size": micro, "gradient_accumulation_steps": accumulation, "global_batch_size": total}
    for key, value in given.items():
        if value is not None and value < 1:
            raise UserError(f"{key}={value}: at least 1")
    if micro is not None and accumulation is not None:
        if total not in (None, micro * accumulation * dp_size):
            raise UserError(
                f"micro_batch_size={micro} x gradient_accumulation_steps={accumulation} x dp={dp_size} is "
                f"{micro * accumulation * dp_size}, not global_batch_size={total}; give two of them and set the "
                "third to null"
            )
        return micro, accumulation
    if micro is not None and total is not None:
        return micro, _divide(total, micro * dp_size, f"micro_batch_size={micro} x dp={dp_size}")
    if accumulation is not None and total is not None:
        return _divide(
            total, accumulation * dp_size, f"gradient_accumulation_steps={accumulation} x dp={dp_size}"
        ), accumulation
    missing = ", ".join(key for key, value in given.items() if value is None)
    raise UserError(
        f"two of micro_batch_size, gradient_accumulation_steps and global_batch_size must be given; missing: {missing}"
    )


def _spans_hosts(ranks: list[int], hosts: list[str]) -> bool:
    return len({hosts[rank] for rank in ranks}) > 1


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] -> "0-2, 5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _divide(global_batch_size: int, divisor: int, what: str) -> int:
    if global_batch_size % divisor:
        below = global_batch_size // divisor * divisor
        nearest = f"{below} or {below + divisor}" if below else f"{divisor}"
        raise UserError(
            f"global_batch_size={global_batch_size} is not a multiple of {what} = {divisor}; the nearest is {nearest}"
        )
    return global_batch_size // divisor
