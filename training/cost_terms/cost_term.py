"""The arguments and the results of cost terms: a stage or a chunk of layers, and its part of the memory, of the passes,
or of the end of the step.

A new key that costs or saves memory or time is a file next to this one, and its functions are lines in `table.py`. The
plan, the fit check and the report read the sums alone.

P stages, V chunks of layers a stage, M micro-batches of one replica in a step, B micro-batch, T sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self

from training.config.precision import DTYPES
from training.config.schema import AttnImplementation, Device, Precision, RunConfig
from training.costs.cost import LayerCost
from training.costs.hardware import Machine
from training.costs.links import Sent
from training.distributed.pinned_memory import pinned_bytes
from training.distributed.topology import Layout
from training.engine.deepspeed_config import choose_reduce_dtype
from training.objectives.registry import count_rows
from training.pipeline.activation_checkpoint import ActivationCheckpointing, Group, build_activation_checkpointing
from training.pipeline.schedule import Schedule
from training.pipeline.schedules import build_schedule, find_schedule

INPUT_BYTES = 8  # of a token on its way into the first layer: input_ids are int64
# Of the integers that cross a boundary with hidden_states: position_ids int64, segment_ids int32
BOUNDARY_BYTES = 8 + 4


class Summed:
    """A dataclass that is added field by field."""

    def __add__(self, other: Self) -> Self:
        mine, others = vars(self), vars(other)
        return type(self)(**{name: mine[name] + others[name] for name in mine})


@dataclass(frozen=True, kw_only=True)
class Memory(Summed):
    """Bytes of a stage on one GPU, by kind.

    A GPU is fullest either in the backward pass (activations, or the loss) or at the optimizer step (DeepSpeed's copies
    of the gradients, when the activations are gone); the peak is the larger of the two.
    """

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0  # of all micro-batches in flight
    # By how much the one group of layers that is recomputed exceeds what later layers have freed by then, or what a
    # layer without a backward pass makes in its forward pass exceeds what the others keep
    recomputation: int = 0
    loss: int = 0
    buffers: int = 0  # of communication
    step: int = 0  # what the optimizer step allocates for itself
    first_pass: int = 0  # of a pass before the step, what is not the stage's own
    host: int = 0  # in the host's memory, for this rank

    @property
    def resident(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.buffers

    @property
    def backward_peak(self) -> int:
        """The loss is done before the first group is recomputed."""
        return self.resident + self.activations + max(self.recomputation, self.loss)

    @property
    def peak(self) -> int:
        return max(self.backward_peak, self.resident + self.step, self.resident + self.first_pass)


@dataclass(frozen=True, kw_only=True)
class Kept(Summed):
    """Bytes of one micro-batch in one chunk of layers."""

    activations: int = 0  # `Memory.activations` of it alone
    recomputation: int = 0  # `Memory.recomputation`
    deferred: int = 0  # its activations between the two halves of its backward pass
    host: int = 0  # in the host's memory
    copied: int = 0  # to the host's memory, and back


@dataclass(frozen=True, kw_only=True)
class PassCost(Summed):
    """One micro-batch through one chunk of layers. FLOPs are of a token, seconds and bytes of the micro-batch."""

    forward_flops: float = 0
    backward_flops: float = 0
    forward_seconds: float = 0
    backward_seconds: float = 0  # with what is recomputed
    sending_seconds: float = 0  # those of both passes that wait for what the ranks of a layer send to each other
    deferred_seconds: float = 0  # those of `backward_seconds` that a schedule can put off
    recomputed_seconds: float = 0  # those of `backward_seconds` in which layers run forward again
    selection_seconds: float = 0  # those of both passes in which indexers select keys
    sent: Sent = field(default_factory=Sent)  # what both passes wait for


@dataclass(frozen=True, kw_only=True)
class StepCost(Summed):
    """The end of a step, after a stage's passes."""

    reduce_seconds: float = 0  # to reduce gradients, without sending
    reduce_sent: Sent = field(default_factory=Sent)
    optimizer_seconds: float = 0


@dataclass(frozen=True)
class PlannedRun:
    """The inputs of a plan apart from the costs of its layers."""

    config: RunConfig
    layout: Layout
    vocab_size: int
    hardware: Machine
    auxiliary: Sequence[Stage] = ()  # the stages of a frozen model in memory next to these; empty without
    sums: dict[tuple[Any, ...], Any] = field(default_factory=dict, init=False, compare=False)  # of `table.py`

    @cached_property
    def schedule(self) -> Schedule:
        """The schedule; without times where its passes are not ordered by them, so that layouts with others have the
        same one, whose states in flight are known."""
        is_ordered = find_schedule(self.layout.schedule).splits_backward
        return build_schedule(self.layout if is_ordered else replace(self.layout, pass_times=()))

    @cached_property
    def tokens_per_sample(self) -> int:
        return count_rows(self.config) * self.config.max_seq_length

    @cached_property
    def tokens(self) -> int:
        """Tokens of a micro-batch on one rank, B x T; B is twice `micro_batch_size` where a sample is two rows, T the
        rank's part of a sequence that several share."""
        return self.layout.micro_batch_size * self.tokens_per_sample // self.layout.context_parallel_size

    @property
    def weight_bytes(self) -> int:
        """Bytes of a weight."""
        return DTYPES[self.config.precision].itemsize

    @property
    def reduce_bytes(self) -> int:
        """Bytes of a gradient while it is summed over replicas."""
        return 4 if choose_reduce_dtype(self.config, self.layout) == "fp32" else 2

    @property
    def gradient_bytes(self) -> int:
        """Bytes of a gradient summed over micro-batches."""
        return 2 if self.config.precision is Precision.fp16 else 4

    def pin(self, nbytes: int) -> int:
        """Return the bytes of the host for a tensor that is copied to a GPU from there, or that stays there for a
        CPU."""
        return pinned_bytes(nbytes) if self.hardware.device is Device.cuda else nbytes

    @property
    def is_eager(self) -> bool:
        """Whether attention is two products of matrices, of all scores."""
        return self.config.attn_implementation is AttnImplementation.eager

    @cached_property
    def flops_per_second(self) -> float:
        """FLOP/s of a GPU in large products."""
        return self.hardware.peak_flops[self.config.precision.value] * self.hardware.efficiency

    def time_flops(self, flops: float) -> float:
        """Return the seconds of a micro-batch's large products. flops: of a token."""
        return flops * self.tokens / self.flops_per_second


@dataclass(frozen=True)
class Chunk:
    """Consecutive layers of a stage."""

    run: PlannedRun
    stage_id: int
    number: int  # in the order of the model
    indices: range  # of its layers in the model
    layers: Sequence[LayerCost]
    has_loss: bool  # that of the model
    has_backward: bool = True  # False for a pass that only goes forward

    @cached_property
    def kind(self) -> tuple[Any, ...]:
        """All that its costs follow from within a run. The auxiliary stage beside it may be another one than beside
        a chunk of the same layers, and the stage's first chunk counts its pass."""
        auxiliary: tuple[Any, ...] = ()
        if self.run.auxiliary:
            own = self.run.auxiliary[self.stage_id]
            auxiliary = own.kind, self.number == own.chunks[0].number
        return self.number == 0, self.has_loss, auxiliary, *self.layers

    @property
    def hidden_bytes(self) -> int:
        """Bytes of a micro-batch's hidden_states, between layers: embedding and head may have fewer (mamba)."""
        return max(layer.bytes.output for layer in self.layers)

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
        return INPUT_BYTES * self.run.tokens if self.number == 0 else self.hidden_bytes

    @property
    def boundary_bytes(self) -> int:
        """Bytes between the chunk and the next: hidden_states and integers there, the gradient of hidden_states
        back."""
        return 0 if self.has_loss else 2 * self.layers[-1].bytes.output + self.integer_bytes

    @cached_property
    def checkpointing(self) -> ActivationCheckpointing:
        return build_activation_checkpointing(self.run.config)

    @cached_property
    def num_forward_only(self) -> int:
        """The number of its first layers that run no backward pass: those of the model's first chunk below the first
        layer with a trained parameter. Any later chunk runs all of its layers backward, since the engine asks for the
        gradient of whatever a chunk receives (`Runner._forward`)."""
        if self.number > 0 and self.has_backward:
            return 0
        trained = (number for number, layer in enumerate(self.layers) if layer.parameters.trained and self.has_backward)
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

    def list_recomputed_groups(self) -> list[Sequence[LayerCost]]:
        """Return the layers of each group that runs again in the backward pass, whole or but for the results that
        `selective` keeps; without the head, which is in the loss."""
        stop = len(self.layers) - self.has_loss
        groups = (group for group in self.groups if group.is_recomputed and group.start < stop)
        return [self.layers[group.start : min(group.stop, stop)] for group in groups]

    def list_recomputed(self) -> list[LayerCost]:
        """Return all layers of `list_recomputed_groups`."""
        return [layer for group in self.list_recomputed_groups() for layer in group]

    def list_stopped(self) -> list[LayerCost]:
        """Return the layers whose recomputation stops before its last products, as soon as all that was kept is there
        again (torch's `set_checkpoint_early_stop`): the last one of each group, unless it is compiled."""
        if self.run.config.compile or self.checkpointing.is_selective:
            return []
        return [group[-1] for group in self.list_recomputed_groups()]


@dataclass(frozen=True)
class Stage:
    """The layers of one pipeline rank."""

    run: PlannedRun
    stage_id: int
    costs: Sequence[LayerCost]  # of the whole model
    indices: Sequence[range]  # of the layers of each chunk; under 1F1B all are one

    @cached_property
    def chunks(self) -> list[Chunk]:
        schedule = self.run.schedule
        numbers, last = schedule.list_chunks(self.stage_id), schedule.last_chunk
        layers = [self.costs[indices.start : indices.stop] for indices in self.indices]
        return [
            Chunk(self.run, self.stage_id, number, indices, held, has_loss=number == last)
            for number, indices, held in zip(numbers, self.indices, layers, strict=True)
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
        whole = self.num_parameters - count_distinct("quantized", self.layers)
        return self.run.weight_bytes * whole + count_distinct("quantized_bytes", self.layers)

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

    def shares(self, layer: LayerCost) -> bool:
        """Return whether another stage has the weights of a layer too."""
        return layer.tied_key is not None and self.run.layout.num_stages > 1


def list_stages(run: PlannedRun, costs: Sequence[LayerCost], bounds: Sequence[int]) -> list[Stage]:
    """Return the stages of a run. costs: of the whole model. bounds: of its P x V chunks."""
    return [
        Stage(run, stage_id, costs, [range(*bounds[chunk : chunk + 2]) for chunk in run.schedule.list_chunks(stage_id)])
        for stage_id in range(run.layout.num_stages)
    ]


def find_largest(layers: Sequence[LayerCost]) -> int:
    """Return the elements of the largest trained tensor."""
    return max((layer.parameters.largest_trained for layer in layers), default=0)


def count_distinct(count: str, layers: Sequence[LayerCost]) -> int:
    """Return the sum of a field of `Parameters` over the layers; a module that several of them share counts once."""
    shared = {layer.tied_key: getattr(layer.parameters, count) for layer in layers if layer.tied_key}
    return sum(getattr(layer.parameters, count) for layer in layers if not layer.tied_key) + sum(shared.values())
