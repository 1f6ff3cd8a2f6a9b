"""A cost term: one aspect of a run, and its part of a stage's memory, passes and end of the step.

A new key that costs or saves memory or time is a file next to this one, with a `CostTerm` in it, and a line in
`table.py`. The plan, the fit check and the report read the sums alone.

P stages, V chunks of layers a stage, M micro-batches of one replica in a step, B micro-batch, T sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from models.adapters.adapter import NF4_BYTES
from training.config.schema import AttnImplementation, FlashKernels, Precision, RunConfig
from training.costs.cost import BOUNDARY_BYTES, INPUT_BYTES, LayerCost
from training.costs.hardware import Machine
from training.costs.kernels import Launch, time_attention, time_kernels
from training.costs.memory import Kept, Memory, bytes_of
from training.costs.time import PassCost, StepCost
from training.distributed.topology import Layout
from training.engine.deepspeed_config import choose_reduce_dtype
from training.objectives.registry import get_objective
from training.pipeline.activation_checkpoint import ActivationCheckpointing, Group, build_activation_checkpointing
from training.pipeline.schedule import Schedule
from training.pipeline.schedules import build_schedule


@dataclass(frozen=True)
class PlannedRun:
    """The inputs of a plan apart from the costs of its layers. hardware: complete. teacher: the stages of one that is
    in memory next to these; empty without."""

    config: RunConfig
    layout: Layout
    vocab_size: int
    hardware: Machine
    teacher: Sequence[Stage] = ()
    sums: dict[tuple[Any, ...], Any] = field(default_factory=dict, init=False, compare=False)  # of `table.py`

    @cached_property
    def tokens_per_sample(self) -> int:
        return get_objective(self.config).group_size(self.config.data) * self.config.max_seq_length

    @cached_property
    def tokens(self) -> int:
        """Tokens of a micro-batch on one rank, B x T; B is twice `micro_batch_size` where a sample is two rows, T the
        rank's part of a sequence that several share."""
        return self.layout.micro_batch_size * self.tokens_per_sample // self.layout.context_parallel_size

    @property
    def weight_bytes(self) -> int:
        """Bytes of a weight."""
        return bytes_of(self.config.precision)

    @property
    def reduce_bytes(self) -> int:
        """Bytes of a gradient while it is summed over replicas."""
        return 4 if choose_reduce_dtype(self.config, self.layout) == "fp32" else 2

    @property
    def gradient_bytes(self) -> int:
        """Bytes of a gradient summed over micro-batches."""
        return 2 if self.config.precision is Precision.fp16 else 4

    @cached_property
    def flops_per_second(self) -> float:
        """FLOP/s of a GPU in large products."""
        return self.hardware.peak_flops[self.config.precision.value] * self.hardware.efficiency

    def time_attention(self, layer: LayerCost, is_backward: bool = False) -> float:
        """Return the seconds of a layer's fused attention over a micro-batch."""
        return self._time_attention(layer, is_backward, layer.work.runs_flash_attention_2)

    def time_flash_attention_2(self, layer: LayerCost, is_backward: bool = False) -> float:
        """Return the seconds of a layer's attention by FlashAttention-2's kernels."""
        return self._time_attention(layer, is_backward, runs_second=True)

    def time_excess(self, layer: LayerCost, is_backward: bool = False) -> float:
        """Return the seconds of a pass that FlashAttention-2's kernels take in addition to the GPU's fastest."""
        fastest = self._time_attention(layer, is_backward, runs_second=False)
        return self.time_attention(layer, is_backward) - fastest

    def _time_attention(self, layer: LayerCost, is_backward: bool, runs_second: bool) -> float:
        products = (1 + is_backward) * layer.work.attention_flops * self.tokens / self.flops_per_second
        by_second = runs_second and self.config.flash_kernels is not FlashKernels.fa3
        return time_attention(products, self.hardware, is_backward, by_second)

    def stretch_experts(self, layer: LayerCost) -> float:
        """Return the products of the most loaded of the ranks that divide a layer's experts, over those of an even load
        (`moe.imbalance`). What its rows move is in the layer's traffic."""
        return 1 + (self.config.moe.imbalance - 1) * layer.work.divided_share

    def time_pass(self, layer: LayerCost, is_backward: bool = False, launch: Launch = Launch.plain) -> float:
        """Return the seconds of a layer's pass over a micro-batch."""
        flops, traffic = layer.work.forward_flops, layer.work.forward_traffic
        if is_backward:
            flops, traffic = layer.work.backward_flops, layer.work.backward_traffic
        flops *= self.stretch_experts(layer)
        attending = 0.0
        if not self._is_eager:  # two matrix products, of all scores
            flops -= (1 + is_backward) * layer.work.attention_flops
            attending = self.time_attention(layer, is_backward)
        return time_kernels(flops * self.tokens / self.flops_per_second, attending, traffic, self.hardware, launch)

    def time_remade(self, layer: LayerCost) -> float:
        """Return the seconds of the operators that `selective` runs again, the scores of eager attention included."""
        flops = self.count_remade_flops(layer)
        launch = Launch.plain if self.config.compile else Launch.selective
        return time_kernels(
            flops * self.tokens / self.flops_per_second, 0.0, layer.work.remade_traffic, self.hardware, launch
        )

    def count_remade_flops(self, layer: LayerCost) -> float:
        """Return the FLOPs of a token that `selective` repeats: those of eager attention."""
        return layer.work.attention_flops if self._is_eager else 0.0

    @property
    def _is_eager(self) -> bool:
        return self.config.attn_implementation is AttnImplementation.eager


@dataclass(frozen=True)
class Chunk:
    """Consecutive layers of a stage. number: in the order of the model. indices: of its layers in the model.
    has_first_layer, has_loss: the model's."""

    run: PlannedRun
    stage_id: int
    number: int
    indices: range
    layers: Sequence[LayerCost]
    has_first_layer: bool
    has_loss: bool

    @cached_property
    def kind(self) -> tuple[Any, ...]:
        """All that its costs follow from within a run."""
        return self.has_first_layer, self.has_loss, *self.layers

    @property
    def hidden_bytes(self) -> int:
        """Bytes of a micro-batch's hidden_states."""
        return self.layers[0].bytes.output

    @property
    def block_bytes(self) -> int:
        """Bytes of the hidden_states that a block of a layer works on: with sequence parallelism the parts of all
        ranks."""
        run = self.run
        return self.hidden_bytes * (run.layout.tensor_parallel_size if run.config.sequence_parallel else 1)

    @property
    def integer_bytes(self) -> int:
        """Bytes of the integers that all layers take in addition to hidden_states; of whole sequences. Tokens are among
        them where further ones are predicted."""
        per_token = BOUNDARY_BYTES + (INPUT_BYTES if self.run.config.mtp.loss_coef else 0)
        return per_token * self.run.tokens * self.run.layout.context_parallel_size

    @property
    def input_bytes(self) -> int:
        """Bytes of the chunk's input: input_ids or hidden_states."""
        return INPUT_BYTES * self.run.tokens if self.has_first_layer else self.hidden_bytes

    @cached_property
    def checkpointing(self) -> ActivationCheckpointing:
        return build_activation_checkpointing(self.run.config)

    @cached_property
    def num_forward_only(self) -> int:
        """The number of its first layers that run no backward pass: those of the model's first chunk below the first
        layer with a trained parameter. Any later chunk runs all of its layers backward, since the engine asks for the
        gradient of whatever a chunk receives (`Runner._forward`)."""
        if not self.has_first_layer:
            return 0
        trained = (number for number, layer in enumerate(self.layers) if layer.parameters.trained)
        return next(trained, len(self.layers))

    @property
    def backward_layers(self) -> Sequence[LayerCost]:
        """The layers that run a backward pass."""
        return self.layers[self.num_forward_only :]

    @cached_property
    def groups(self) -> list[Group]:
        """The groups of layers that a backward pass goes through. One that is recomputed is whole: autograd runs all of
        it again. Of the others the layers below the first trained one are left out."""
        first = self.num_forward_only
        groups = [group for group in self.checkpointing.list_groups(len(self.layers)) if group.stop > first]
        return [each if each.is_recomputed else replace(each, start=max(each.start, first)) for each in groups]

    def list_recomputed(self) -> list[LayerCost]:
        """Return the layers that run again in the backward pass, whole or but for the results that `selective` keeps;
        not the head, which is in the loss."""
        stop = len(self.layers) - self.has_loss
        groups = (group for group in self.groups if group.is_recomputed)
        return [layer for group in groups for layer in self.layers[group.start : min(group.stop, stop)]]

    def list_stopped(self) -> list[LayerCost]:
        """Return the layers whose recomputation stops before its last products, as soon as all that was kept is there
        again (torch's `set_checkpoint_early_stop`): the last one of each group, unless it is compiled."""
        if self.run.config.compile or self.checkpointing.is_selective:
            return []
        stop = len(self.layers) - self.has_loss
        groups = (group for group in self.groups if group.is_recomputed and group.start < stop)
        return [self.layers[min(group.stop, stop) - 1] for group in groups]

    def run_again(self, layers: Sequence[LayerCost]) -> PassCost:
        """Return the cost that a second forward pass of `layers` adds to the backward pass."""
        return PassCost(
            backward_flops=sum(layer.work.forward_flops for layer in layers),
            backward_seconds=sum(map(self.time_repeated, layers)),
            recomputed_seconds=sum(map(self.time_repeated, layers)),
            excess_seconds=sum(map(self.run.time_excess, layers)),
        )

    def remake(self, layers: Sequence[LayerCost]) -> PassCost:
        """Return the cost that `selective` adds to the backward pass: that of the operators whose results it does not
        keep."""
        seconds = sum(map(self.time_remade, layers))
        return PassCost(
            backward_flops=sum(map(self.run.count_remade_flops, layers)),
            backward_seconds=seconds,
            recomputed_seconds=seconds,
        )

    def time_forward(self, layer: LayerCost) -> float:
        """Return the seconds of a micro-batch forward: as timed, or by the GPU's rate."""
        if layer.work.pass_seconds:
            return layer.work.pass_seconds[0] * self.run.tokens * self.run.stretch_experts(layer)
        return self.run.time_pass(layer)

    def time_repeated(self, layer: LayerCost) -> float:
        """Return the seconds of a whole forward pass that is repeated."""
        if layer.work.pass_seconds or self.run.config.compile:
            return self.time_forward(layer)
        return self.run.time_pass(layer, launch=Launch.repeated)

    def time_products(self, layer: LayerCost) -> float:
        """Return the seconds of the products of a forward pass; of a layer that was timed those of all of it."""
        if layer.work.pass_seconds:
            return self.time_forward(layer)
        return layer.work.forward_flops * self.run.tokens / self.run.flops_per_second

    def time_remade(self, layer: LayerCost) -> float:
        """Return the seconds of what `selective` runs again of a layer; of one that was timed by the bytes it moves."""
        if layer.work.pass_seconds:
            moving = layer.work.remade_traffic.moved / self.run.hardware.stream_rate
            return min(moving, self.time_forward(layer))
        return self.run.time_remade(layer)

    def time_deferred(self, layer: LayerCost) -> float:
        """Return the seconds of the backward pass that can be deferred: products alone."""
        if layer.work.pass_seconds is None:
            return layer.work.deferred_flops * self.run.tokens / self.run.flops_per_second
        return (
            layer.work.deferred_flops / layer.work.backward_flops * self.time_backward(layer)
            if layer.work.backward_flops
            else 0
        )

    def time_backward(self, layer: LayerCost) -> float:
        if layer.work.pass_seconds:
            return layer.work.pass_seconds[1] * self.run.tokens * self.run.stretch_experts(layer)
        return self.run.time_pass(layer, is_backward=True)


@dataclass(frozen=True)
class Stage:
    """The layers of one pipeline rank. costs: of the whole model. indices: of the layers of each chunk; under 1F1B all
    are one."""

    run: PlannedRun
    stage_id: int
    costs: Sequence[LayerCost]
    indices: Sequence[range]

    @cached_property
    def schedule(self) -> Schedule:
        return build_schedule(self.run.layout)

    @cached_property
    def chunks(self) -> list[Chunk]:
        numbers = self.schedule.list_chunks(self.stage_id)
        return [
            Chunk(
                self.run,
                self.stage_id,
                number,
                indices,
                self.costs[indices.start : indices.stop],
                has_first_layer=number == 0,
                has_loss=number == self.schedule.last_chunk,
            )
            for number, indices in zip(numbers, self.indices, strict=True)
        ]

    @cached_property
    def kind(self) -> tuple[Any, ...]:
        """All that its costs follow from within a run, but for the micro-batches in flight."""
        ends = self.stage_id == 0, self.stage_id == self.run.layout.num_stages - 1
        return *ends, *(chunk.kind for chunk in self.chunks)

    @property
    def has_loss(self) -> bool:
        return self.chunks[-1].has_loss

    @cached_property
    def layers(self) -> list[LayerCost]:
        return [layer for chunk in self.chunks for layer in chunk.layers]

    @cached_property
    def num_parameters(self) -> int:
        return count_distinct("held", self.layers)

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of the weights, whole on this rank."""
        in_4bit = count_distinct("in_4bit", self.layers)
        return self.run.weight_bytes * (self.num_parameters - in_4bit) + round(NF4_BYTES * in_4bit)

    @cached_property
    def num_trainable(self) -> int:
        return count_distinct("trained", self.layers)

    @cached_property
    def num_in_part(self) -> int:
        """Trainable elements whose optimizer state this rank has: its part of those of the replicas, and of the experts
        that it shares with fewer of them."""
        layout = self.run.layout
        divided, num_shares = count_distinct("divided", self.layers), layout.topology.num_expert_shares
        return -(-(self.num_trainable - divided) // layout.num_shards) + -(-divided * num_shares // layout.num_shards)

    @cached_property
    def largest_trainable(self) -> int:
        """Elements of the largest trainable tensor."""
        return max(layer.parameters.largest_trained for layer in self.layers)


def list_stages(run: PlannedRun, costs: Sequence[LayerCost], bounds: Sequence[int]) -> list[Stage]:
    """Return the stages of a run. costs: of the whole model. bounds: of its P x V chunks."""
    schedule = build_schedule(run.layout)
    return [
        Stage(run, stage_id, costs, [range(*bounds[chunk : chunk + 2]) for chunk in schedule.list_chunks(stage_id)])
        for stage_id in range(run.layout.num_stages)
    ]


def count_distinct(count: str, layers: Sequence[LayerCost]) -> int:
    """Return the sum of a field of `Parameters` over the layers; a module that several of them share counts once."""
    shared = {layer.tied_key: getattr(layer.parameters, count) for layer in layers if layer.tied_key}
    return sum(getattr(layer.parameters, count) for layer in layers if not layer.tied_key) + sum(shared.values())


@dataclass(frozen=True, kw_only=True)
class CostTerm:
    """The costs that one aspect of a run adds; None adds nothing.

    stage_memory: bytes that are allocated once, by kind, on the GPU and on the host. chunk_memory: bytes of each
    micro-batch in flight. chunk_cost: of each micro-batch's passes. stage_cost: of the end of the step.
    """

    stage_memory: Callable[[Stage], Memory] | None = None
    chunk_memory: Callable[[Chunk], Kept] | None = None
    chunk_cost: Callable[[Chunk], PassCost] | None = None
    stage_cost: Callable[[Stage], StepCost] | None = None
