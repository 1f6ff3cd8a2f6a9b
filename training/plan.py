"""The plan of a run: what each stage holds and how long a step takes. Pure functions of layer costs, a layout and a machine.

Sources and assumptions: docs/plan.md. P stages, M micro-batches of one replica in a step, B micro-batch, T sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from transformers import PretrainedConfig

from models.architecture import Layer
from training.config import Offload, OptimizerName, Precision, RunConfig, Task, get_task, rows_per_sample
from training.hardware import GB, GIB, Machine
from training.layout import Layout
from training.partition import Fits, list_chunks
from training.plan_cost import POSITION_BYTES, LayerCost, count_layers
from training.plan_memory import Memory, bytes_of, compute_memory, compute_state
from training.plan_schedule import Pass, bubble_share, simulate
from training.precision import DTYPES
from training.recompute import build_recompute
from training.trainable import build_adapter


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
    """One stage. chunks: one, but for interleaved 1F1B. Figures of passes are those of all its chunks together."""

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
    either way [P x V - 1]. bubble: (P - 1) / (V M + P - 1). idle: the share of a stage's time that the simulated step waits, on average, uneven stages counted.
    imbalance: by how much the slowest stage exceeds the mean.
    """

    layout: Layout
    stages: list[StagePlan]
    boundary_bytes: list[int]
    bubble: float
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


def count_costs(config: RunConfig, architecture: PretrainedConfig, layers: Sequence[Layer], layout: Layout) -> list[LayerCost]:
    """What `compute_plan` takes. layers: as `cut_layers` makes them for the layout. Moves what the layers share to the meta device."""
    return count_layers(
        layers, architecture, layout.micro_batch_size * rows_per_sample(config), config.max_seq_length, DTYPES[config.precision],
        build_adapter(config, layers), config.freeze, layout.tensor_parallel_size,
    )  # fmt: skip


def compute_plan(costs: Sequence[LayerCost], bounds: Sequence[int], layout: Layout, vocab_size: int, config: RunConfig, hardware: Machine) -> Plan:
    """costs: of one micro-batch of `layout.micro_batch_size` samples, `rows_per_sample` x `config.max_seq_length` tokens each."""
    tokens_per_sample = rows_per_sample(config) * config.max_seq_length
    tokens = layout.micro_batch_size * tokens_per_sample
    chunks = [_plan_chunk(costs, start, stop, layout, tokens, config, hardware) for start, stop in pairwise(bounds)]
    held = [[costs[chunk.start : chunk.stop] for chunk in list_chunks(bounds, layout.num_stages, stage)] for stage in range(layout.num_stages)]
    stages = [
        StagePlan(
            stage_id, chunks[stage_id :: layout.num_stages], _distinct(layers, "num_parameters"),
            _compute_stage_memory(layers, stage_id, layout, vocab_size, config, hardware),
        )
        for stage_id, layers in enumerate(held)
    ]  # fmt: skip
    boundary_bytes = [2 * costs[stop - 1].output_bytes + POSITION_BYTES * tokens for stop in bounds[1:-1]]
    transfer = [size / 2 / (_bandwidth_between(layout, chunk % layout.num_stages, hardware) * GB) for chunk, size in enumerate(boundary_bytes)]
    forward, backward = [c.forward_seconds for c in chunks], [c.backward_seconds for c in chunks]
    passes = simulate(forward, backward, transfer, layout.gradient_accumulation_steps, layout.num_chunks)
    pipeline_seconds = max(p.stop for p in passes)
    busy = [layout.gradient_accumulation_steps * (stage.forward_seconds + stage.backward_seconds) for stage in stages]
    trainable = [_distinct(layers, "num_trainable") for layers in held]
    reduce_seconds = max(compute_reduce_seconds(n, layout, stage, config.precision, hardware) for stage, n in enumerate(trainable))
    optimizer_seconds = max(compute_optimizer_seconds(n, layout, config, hardware) for n in trainable)
    tokens_per_step = layout.global_batch_size * tokens_per_sample
    step_seconds = pipeline_seconds + reduce_seconds + optimizer_seconds
    peak = hardware.peak_flops[config.precision.value] * layout.world_size
    return Plan(
        layout=layout,
        stages=stages,
        boundary_bytes=boundary_bytes,
        bubble=bubble_share(layout.num_stages, layout.gradient_accumulation_steps, layout.num_chunks),
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


def _plan_chunk(costs: Sequence[LayerCost], start: int, stop: int, layout: Layout, tokens: int, config: RunConfig, hardware: Machine) -> ChunkPlan:
    layers = costs[start:stop]
    recompute = build_recompute(config)
    forward = sum(layer.forward_flops for layer in layers)
    # Twice the forward pass, less the gradients of what is frozen, and once more what is recomputed; the head's logits are made in the
    # loss, once, or, where it is no sum over tokens, again in the backward pass.
    in_loss = len(layers) - 1 if stop == len(costs) else len(layers)
    groups = [] if recompute.is_selective else [group for group in recompute.list_groups(len(layers)) if group.is_recomputed]
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
    remade = sum(layers[i].forward_sums for g in recompute.list_groups(len(layers)) if g.is_recomputed for i in range(g.start, min(g.stop, in_loss)))
    sums = one_sum * sum(layer.forward_sums for layer in layers), one_sum * (sum(layer.backward_sums for layer in layers) + remade)
    return ChunkPlan(
        start, stop - 1, forward, backward,
        forward_seconds=seconds[0] * tokens + sums[0], backward_seconds=seconds[1] * tokens + sums[1], sum_seconds=sum(sums),
    )  # fmt: skip


def _compute_stage_memory(
    chunks: Sequence[Sequence[LayerCost]], stage_id: int, layout: Layout, vocab_size: int, config: RunConfig, hardware: Machine
) -> Memory:
    state = compute_state(
        _distinct(chunks, "num_parameters"), _distinct(chunks, "num_trainable"), layout.dp_size, config.precision, config.offload_optimizer,
        config.optimizer.name, hardware.device,
    )  # fmt: skip
    tokens = layout.micro_batch_size * rows_per_sample(config) * config.max_seq_length
    return compute_memory(
        chunks, stage_id, layout.num_stages, layout.gradient_accumulation_steps, build_recompute(config), tokens,
        -(-vocab_size // layout.tensor_parallel_size), state, config.precision,
    )  # fmt: skip


def build_fits(costs: Sequence[LayerCost], layout: Layout, vocab_size: int, config: RunConfig, hardware: Machine) -> Fits:
    """Tells of a stage whether a card holds it; for `training.partition`. costs: as for `compute_plan`."""

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


def _spans_nodes(ranks: Sequence[int], cards_per_node: int) -> bool:
    return len({rank // cards_per_node for rank in ranks}) > 1


def _bandwidth_between(layout: Layout, stage_id: int, hardware: Machine) -> float:
    """GB/s from `stage_id` to the next stage, or from the last to the first, of the replica whose path is slowest."""
    starts = range(stage_id * layout.ranks_a_stage, (stage_id + 1) * layout.ranks_a_stage)
    crosses = any(_spans_nodes((rank, (rank + layout.ranks_a_stage) % layout.world_size), hardware.cards_per_node) for rank in starts)
    return hardware.inter_node_bandwidth if crosses else hardware.intra_node_bandwidth


def compute_sum_seconds(nbytes: int, layout: Layout, hardware: Machine) -> float:
    """All-reduce of `nbytes` over the slowest tensor-parallel group, on a ring."""
    size = layout.tensor_parallel_size
    crosses = any(_spans_nodes(ranks, hardware.cards_per_node) for ranks in layout.list_tensor_parallel_groups())
    bandwidth = hardware.inter_node_bandwidth if crosses else hardware.intra_node_bandwidth
    return 2 * (size - 1) / size * nbytes / (bandwidth * GB)


def compute_reduce_seconds(num_trainable: int, layout: Layout, stage_id: int, precision: Precision, hardware: Machine) -> float:
    """All-reduce of the gradients and all-gather of the weights over the stage's replicas, on a ring; both in the training dtype.

    Gradients go through a bucket on one replica too (`reduce_gradients`, `buffered_allreduce_fallback`): put in, divided, flattened to be
    sent, taken back, and out.
    """
    ranks = range(stage_id * layout.ranks_a_stage, (stage_id + 1) * layout.ranks_a_stage, layout.tensor_parallel_size)
    bandwidth = hardware.inter_node_bandwidth if _spans_nodes(ranks, hardware.cards_per_node) else hardware.intra_node_bandwidth
    share = (layout.dp_size - 1) / layout.dp_size
    copied = {Precision.fp32: 5 * (4 + 4), Precision.bf16: 2 * (4 + 4) + 2 * (4 + 2) + (2 + 2), Precision.fp16: 5 * (2 + 2)}[precision]
    return num_trainable * (copied / (hardware.memory_bandwidth * GB) + 3 * share * bytes_of(precision) / (bandwidth * GB))


def count_update_bytes(optimizer: OptimizerName, precision: Precision) -> int:
    """What an optimizer step reads and writes for a trained parameter, as seen of deepspeed 0.19.8's operations.

    `BF16_Optimizer` takes the norm of the fp32 gradient, clips it, and sets it and its bf16 part to zero; `DeepSpeedZeroOptimizer` takes the
    norm in fp64, copies the gradient and clips that. Then the gradient is read, master weight and AdamW's moments read and written, and
    the weight copied from its master.
    """
    gradient = 4 + (4 + 4) + (4 + 4) if precision is Precision.bf16 else (4 + 8 + 8) + (4 + 4) + (4 + 4)
    moments = 16 if optimizer is OptimizerName.adamw else 0
    return gradient + 4 + (4 + 4) + moments + 4 + bytes_of(precision)


def compute_optimizer_seconds(num_trainable: int, layout: Layout, config: RunConfig, hardware: Machine) -> float:
    """Bound by memory: `count_update_bytes` of this replica's part."""
    part = num_trainable / layout.dp_size
    moved = count_update_bytes(config.optimizer.name, config.precision) * part
    if config.offload_optimizer is Offload.none:
        return moved / (hardware.memory_bandwidth * GB)
    ranks_on_node = min(layout.world_size, hardware.cards_per_node)
    across = (4 + bytes_of(config.precision)) * part / (hardware.host_link_bandwidth * GB)
    return across + moved * ranks_on_node / (hardware.host_memory_bandwidth * GB)


def compute_host_bytes(bytes_of_stage: Sequence[int], layout: Layout, cards_per_node: int) -> int:
    """Host memory of the fullest node; ranks fill the nodes in order."""
    nodes = [range(first, min(first + cards_per_node, layout.world_size)) for first in range(0, layout.world_size, cards_per_node)]
    return max(sum(bytes_of_stage[layout.stage_id(rank)] for rank in ranks) for ranks in nodes)
