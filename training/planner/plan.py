"""The plan of a run: what each stage holds and how long a step takes. Pure functions of layer costs, a layout and a machine.

Sources and assumptions: docs/plan.md. P stages, M micro-batches of one replica in a step, B micro-batch, T sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from transformers import PretrainedConfig

from models.layer import Layer
from training.config.precision import DTYPES
from training.config.schema import RunConfig, Task, get_task, rows_per_sample
from training.distributed.topology import Layout
from training.pipeline.activation_checkpoint import build_activation_checkpointing
from training.pipeline.partition import Fits, list_chunks
from training.pipeline.schedule import Schedule, build_schedule
from training.pipeline.trainable import build_adapter
from training.planner.cost import BOUNDARY_BYTES, LayerCost, count_layers
from training.planner.hardware import GB, GIB, Machine
from training.planner.memory import Memory, compute_memory, compute_state
from training.planner.simulation import Pass, simulate
from training.planner.time import (
    compute_optimizer_seconds,
    compute_reduce_seconds,
    compute_sum_seconds,
    find_bandwidth_between,
)


@dataclass(frozen=True)
class ChunkPlan:
    """Consecutive layers of a stage. first_layer, last_layer: counted with the embedding, both included. forward_flops: of a token."""

    first_layer: int
    last_layer: int
    forward_flops: float
    backward_flops: float  # of a token, with what is recomputed
    forward_seconds: float  # of a micro-batch
    backward_seconds: float
    sum_seconds: float  # those of them in which the ranks that share layers sum activations


@dataclass(frozen=True)
class StagePlan:
    """One stage. chunks: as many as its schedule gives a rank. Figures of passes are those of all its chunks together."""

    stage_id: int
    chunks: list[ChunkPlan]
    num_parameters: int
    memory: Memory

    @property
    def layers(self) -> str:
        """In words: 0-4, or 0-2+7-9."""
        return "+".join(f"{chunk.first_layer}-{chunk.last_layer}" for chunk in self.chunks)

    @property
    def forward_flops(self) -> float:
        return sum(chunk.forward_flops for chunk in self.chunks)

    @property
    def backward_flops(self) -> float:
        return sum(chunk.backward_flops for chunk in self.chunks)

    @property
    def forward_seconds(self) -> float:
        return sum(chunk.forward_seconds for chunk in self.chunks)

    @property
    def backward_seconds(self) -> float:
        return sum(chunk.backward_seconds for chunk in self.chunks)

    @property
    def sum_seconds(self) -> float:
        return sum(chunk.sum_seconds for chunk in self.chunks)


@dataclass(frozen=True)
class Plan:
    """A run, foreseen. Bytes and seconds.

    boundary_bytes: across each boundary for a micro-batch, forward and backward together [P x V - 1], V chunks a stage. transfer_seconds:
    either way [P x V - 1]. idle: the share of a stage's time that the simulated step waits, on average, uneven stages counted.
    imbalance: by how much the slowest stage exceeds the mean.
    """

    layout: Layout
    stages: list[StagePlan]
    boundary_bytes: list[int]
    idle: float
    imbalance: float
    passes: list[Pass]
    transfer_seconds: list[float]
    pipeline_seconds: float
    reduce_seconds: float
    optimizer_seconds: float
    tokens_per_step: int
    mfu: float
    host_bytes: int  # of the fullest node
    memory_limit: float  # bytes of a card that can be used
    host_limit: float
    has_estimates: bool

    @property
    def schedule(self) -> Schedule:
        return build_schedule(self.layout)

    @property
    def bubble(self) -> float:
        """The share of a step that a stage would wait if all were even."""
        return self.schedule.bubble_share

    @property
    def step_seconds(self) -> float:
        return self.pipeline_seconds + self.reduce_seconds + self.optimizer_seconds

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_per_step / self.step_seconds

    @property
    def fullest(self) -> StagePlan:
        return max(self.stages, key=lambda stage: stage.memory.peak)

    @property
    def missing_memory(self) -> float:
        """Bytes by which the fullest card overflows; negative when it fits."""
        return self.fullest.memory.peak - self.memory_limit

    @property
    def missing_host_memory(self) -> float:
        return self.host_bytes - self.host_limit

    @property
    def fits(self) -> bool:
        return self.missing_memory <= 0 and self.missing_host_memory <= 0


def count_costs(
    config: RunConfig, architecture: PretrainedConfig, layers: Sequence[Layer], layout: Layout
) -> list[LayerCost]:
    """What `compute_plan` takes. layers: as `shard_layers` makes them for the layout. Moves what the layers share to the meta device."""
    return count_layers(
        layers, architecture, layout.micro_batch_size * rows_per_sample(config), config.max_seq_length, DTYPES[config.precision],
        build_adapter(config, layers), config.freeze, layout.tensor_parallel_size,
    )  # fmt: skip


def compute_plan(
    costs: Sequence[LayerCost],
    bounds: Sequence[int],
    layout: Layout,
    vocab_size: int,
    config: RunConfig,
    hardware: Machine,
) -> Plan:
    """costs: of one micro-batch of `layout.micro_batch_size` samples, `rows_per_sample` x `config.max_seq_length` tokens each."""
    tokens_per_sample = rows_per_sample(config) * config.max_seq_length
    tokens = layout.micro_batch_size * tokens_per_sample
    chunks = [_plan_chunk(costs, start, stop, layout, tokens, config, hardware) for start, stop in pairwise(bounds)]
    held = [
        [costs[chunk.start : chunk.stop] for chunk in list_chunks(bounds, layout.num_stages, stage)]
        for stage in range(layout.num_stages)
    ]
    stages = [
        StagePlan(
            stage_id, chunks[stage_id :: layout.num_stages], _distinct(layers, "num_parameters"),
            _compute_stage_memory(layers, stage_id, layout, vocab_size, config, hardware),
        )
        for stage_id, layers in enumerate(held)
    ]  # fmt: skip
    boundary_bytes = [2 * costs[stop - 1].output_bytes + BOUNDARY_BYTES * tokens for stop in bounds[1:-1]]
    transfer = [
        size / 2 / (find_bandwidth_between(layout, chunk % layout.num_stages, hardware) * GB)
        for chunk, size in enumerate(boundary_bytes)
    ]
    forward, backward = [c.forward_seconds for c in chunks], [c.backward_seconds for c in chunks]
    passes = simulate(build_schedule(layout), forward, backward, transfer)
    pipeline_seconds = max(p.stop for p in passes)
    busy = [layout.gradient_accumulation_steps * (stage.forward_seconds + stage.backward_seconds) for stage in stages]
    trainable = [_distinct(layers, "num_trainable") for layers in held]
    reduce_seconds = max(
        compute_reduce_seconds(n, layout, stage, config, hardware) for stage, n in enumerate(trainable)
    )
    optimizer_seconds = max(compute_optimizer_seconds(n, layout, config, hardware) for n in trainable)
    tokens_per_step = layout.global_batch_size * tokens_per_sample
    step_seconds = pipeline_seconds + reduce_seconds + optimizer_seconds
    peak = hardware.peak_flops[config.precision.value] * layout.world_size
    return Plan(
        layout=layout,
        stages=stages,
        boundary_bytes=boundary_bytes,
        idle=1 - sum(busy) / (len(busy) * pipeline_seconds),
        imbalance=max(busy) / (sum(busy) / len(busy)) - 1,
        passes=passes,
        transfer_seconds=transfer,
        pipeline_seconds=pipeline_seconds,
        reduce_seconds=reduce_seconds,
        optimizer_seconds=optimizer_seconds,
        tokens_per_step=tokens_per_step,
        mfu=compute_model_flops(costs, config.max_seq_length) * tokens_per_step / step_seconds / peak,
        host_bytes=compute_host_bytes([stage.memory.host for stage in stages], layout, hardware.cards_per_node),
        memory_limit=hardware.usable_bytes,
        host_limit=hardware.host_memory * GIB,
        has_estimates=any(cost.is_estimated for cost in costs),
    )


def _plan_chunk(
    costs: Sequence[LayerCost], start: int, stop: int, layout: Layout, tokens: int, config: RunConfig, hardware: Machine
) -> ChunkPlan:
    layers = costs[start:stop]
    recompute = build_activation_checkpointing(config)
    forward = sum(layer.forward_flops for layer in layers)
    # Twice the forward pass, less the gradients of what is frozen, and once more what is recomputed; the head's logits are made in the
    # loss, once, or, where it is no sum over tokens, again in the backward pass.
    in_loss = len(layers) - 1 if stop == len(costs) else len(layers)
    groups = (
        [] if recompute.is_selective else [group for group in recompute.list_groups(len(layers)) if group.is_recomputed]
    )
    again = [i for group in groups for i in range(group.start, min(group.stop, in_loss))]
    again += range(in_loss, len(layers)) if get_task(config) is Task.dpo else []
    backward = 2 * forward - sum(layer.frozen_flops for layer in layers) + sum(layers[i].forward_flops for i in again)
    timed = [layer.pass_seconds for layer in layers if layer.pass_seconds is not None]
    if len(timed) == len(layers):
        seconds = sum(there for there, _ in timed), sum(back for _, back in timed) + sum(timed[i][0] for i in again)
    else:
        rate = hardware.peak_flops[config.precision.value] * hardware.efficiency
        seconds = forward / rate, backward / rate
    one_sum = compute_sum_seconds(layers[0].output_bytes, layout, hardware)
    remade = sum(
        layers[i].forward_sums
        for g in recompute.list_groups(len(layers))
        if g.is_recomputed
        for i in range(g.start, min(g.stop, in_loss))
    )
    sums = (
        one_sum * sum(layer.forward_sums for layer in layers),
        one_sum * (sum(layer.backward_sums for layer in layers) + remade),
    )
    return ChunkPlan(
        start, stop - 1, forward, backward,
        forward_seconds=seconds[0] * tokens + sums[0], backward_seconds=seconds[1] * tokens + sums[1], sum_seconds=sum(sums),
    )  # fmt: skip


def _compute_stage_memory(
    chunks: Sequence[Sequence[LayerCost]],
    stage_id: int,
    layout: Layout,
    vocab_size: int,
    config: RunConfig,
    hardware: Machine,
) -> Memory:
    state = compute_state(
        _distinct(chunks, "num_parameters"), _distinct(chunks, "num_trainable"), layout.num_weight_replicas, config.precision, config.offload_optimizer,
        config.optimizer.name, hardware.device, largest=max(layer.largest_trainable for layers in chunks for layer in layers),
    )  # fmt: skip
    tokens = layout.micro_batch_size * rows_per_sample(config) * config.max_seq_length
    return compute_memory(
        chunks, stage_id, build_schedule(layout), build_activation_checkpointing(config), tokens,
        -(-vocab_size // layout.tensor_parallel_size), state, config.precision,
    )  # fmt: skip


def build_fits(
    costs: Sequence[LayerCost], layout: Layout, vocab_size: int, config: RunConfig, hardware: Machine
) -> Fits:
    """Tells of a stage whether a card holds it; for `training.pipeline.partition`. costs: as for `compute_plan`."""

    @cache
    def fits(stage_id: int, start: int, stop: int) -> bool:
        memory = _compute_stage_memory([costs[start:stop]], stage_id, layout, vocab_size, config, hardware)
        return memory.peak <= hardware.usable_bytes

    return fits


def _distinct(chunks: Sequence[Sequence[LayerCost]], count: str) -> int:
    """The sum of a count over the layers of a stage, a module that several of them share once."""
    layers = [layer for chunk in chunks for layer in chunk]
    shared = {layer.tied_key: getattr(layer, count) for layer in layers if layer.tied_key}
    return sum(getattr(layer, count) for layer in layers if not layer.tied_key) + sum(shared.values())


def compute_model_flops(costs: Sequence[LayerCost], seq_length: float) -> float:
    """FLOPs of a token by the convention of MFU (PaLM, 2204.02311, appendix B): 6 N + 6 T x attention width.

    N counts each parameter that a token uses once, the embedding too; attention is counted in full, without the causal half, and
    recomputation is not.
    """
    owners = {cost.tied_key or index: cost.num_active for index, cost in enumerate(costs)}
    return 6 * sum(owners.values()) + 6 * seq_length * sum(cost.attention_width for cost in costs)


def compute_host_bytes(bytes_of_stage: Sequence[int], layout: Layout, cards_per_node: int) -> int:
    """Host memory of the fullest node; ranks fill the nodes in order."""
    nodes = [
        range(first, min(first + cards_per_node, layout.world_size))
        for first in range(0, layout.world_size, cards_per_node)
    ]
    return max(sum(bytes_of_stage[layout.stage_id(rank)] for rank in ranks) for ranks in nodes)
