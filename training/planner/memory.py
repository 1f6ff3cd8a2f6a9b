"""What a card holds: pure arithmetic on parameter counts and bytes, after what DeepSpeed 0.19.8 allocates.

The card is fullest either in the backward pass (activations, or the loss) or at the optimizer step (DeepSpeed's copies of the
gradients, when the activations are gone); the peak is the larger of the two. docs/plan.md names the lines of DeepSpeed behind each term.

N parameters of the stage, n trainable ones, dp data-parallel replicas, P stages, M micro-batches of one replica in a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from models.losses.cross_entropy import PIECE
from training.config.schema import Device, Offload, OptimizerName, Precision
from training.distributed.p2p import SENDS_IN_FLIGHT
from training.engine.deepspeed_config import REDUCE_BUCKET
from training.pipeline.activation_checkpoint import ActivationCheckpointing
from training.pipeline.schedule import Schedule
from training.planner.cost import BOUNDARY_BYTES, INPUT_BYTES, LayerCost

ALLREDUCE_BUCKET = 500_000_000  # elements that `BF16_Optimizer`'s gradients are reduced by: MEMORY_OPT_ALLREDUCE_SIZE of runtime/pipe/engine.py
HOST_BYTES_A_RANK = 3 * 2**30  # a process with CUDA's libraries loaded; an assumption


@dataclass(frozen=True)
class Memory:
    """Bytes on one card, by kind; `host` in the host's memory, for this rank.

    activations: of all micro-batches in flight. recomputation: by how much the one group of layers that is made again exceeds what
    later layers have given back by then.
    buffers: of communication. step: what the optimizer step allocates for itself.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    recomputation: int
    loss: int
    buffers: int
    step: int
    host: int

    @property
    def resident(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.buffers

    @property
    def backward_peak(self) -> int:
        return (
            self.resident + self.activations + max(self.recomputation, self.loss)
        )  # the loss is done before the first group is

    @property
    def peak(self) -> int:
        return max(self.backward_peak, self.resident + self.step)


def bytes_of(precision: Precision) -> int:
    return 4 if precision is Precision.fp32 else 2


@dataclass(frozen=True)
class State:
    """Bytes of what lives as long as the run, and of the optimizer step's own."""

    weights: int
    gradients: int
    optimizer: int
    buffers: int
    step: int
    host: int


def compute_state(
    num_parameters: int,
    num_trainable: int,
    dp_size: int,
    precision: Precision,
    offload: Offload,
    optimizer: OptimizerName,
    device: Device,
    largest: int = 0,
) -> State:
    """ZeRO-1 (1910.02054): whole weights and gradients on each rank, fp32 master weights and moments cut into dp parts.

    largest: elements of the largest trainable tensor; one that is larger than a bucket is reduced by itself.
    """
    width, n = bytes_of(precision), num_trainable
    weights, part, in_bucket = width * num_parameters, -(-n // dp_size), min(n, REDUCE_BUCKET)
    moments = 8 * part if optimizer is OptimizerName.adamw else 0
    if precision is Precision.bf16 and offload is Offload.none:
        # `BF16_Optimizer`: each micro-batch's gradient in bf16 beside their sum in fp32; between replicas the sum is reduced in bf16, from
        # a copy, and flattened first where matrices and vectors together fill less than one bucket
        step = 2 * n + (4 * n if n <= ALLREDUCE_BUCKET else 0) if dp_size > 1 else 0
        return State(weights, 6 * n, moments + 4 * part, 0, step, 0)
    if precision is Precision.fp32 and offload is Offload.none:
        # `DeepSpeedZeroOptimizer`: as many gradients as a bucket has places for are flattened, then all of this rank's part
        return State(weights, 4 * n, moments + 4 * part, 0, 4 * max(part, in_bucket, largest), 0)
    # Elsewhere its gradients go through buckets, which hold the bytes of what is put in, and are gathered in the rank's part.
    # A GPU's allocator gives the whole bucket at once, a CPU only the pages that are written.
    accumulated = 4 if precision is Precision.bf16 else width
    waiting, filling = (accumulated * REDUCE_BUCKET,) * 2 if device is Device.cuda else (0, accumulated * in_bucket)
    if offload is Offload.cpu:

        def copies(reduced: int) -> int:
            # in bf16 to communicate, again in fp32, and this rank's part (training/engine/zero_patches.py); else straight to the host
            return 6 * reduced + 4 * min(part, reduced) if precision is Precision.bf16 else 0

        step = filling + max(
            copies(in_bucket) - accumulated * in_bucket, copies(largest) if largest > REDUCE_BUCKET else 0
        )
        return State(weights, accumulated * n, 0, waiting, step, moments + (4 + 4 + width) * part)
    step = max(filling + width * part - width * in_bucket, (4 + width) * part)
    return State(weights, width * n, moments + 4 * part, waiting, step, 0)


def compute_memory(
    chunks: Sequence[Sequence[LayerCost]],
    stage_id: int,
    schedule: Schedule,
    recompute: ActivationCheckpointing,
    tokens: int,
    vocab_size: int,
    state: State,
    precision: Precision,
) -> Memory:
    """One stage's memory. chunks: the layers of each, as many as the schedule gives a rank. tokens: of a micro-batch, B x T.

    The schedule says how many micro-batches are in flight; of 1F1B min(P - stage_id, M) (`TrainSchedule.num_pipe_buffers` of DeepSpeed).
    """
    width = bytes_of(precision)
    is_first, is_last = stage_id == 0, stage_id == schedule.num_stages - 1
    hidden = chunks[0][0].output_bytes
    integers = BOUNDARY_BYTES * tokens
    sizes, recomputation = [], 0  # of a micro-batch in each chunk
    for number, layers in enumerate(chunks):
        reads_batch, makes_loss = is_first and number == 0, is_last and number == len(chunks) - 1
        received = INPUT_BYTES * tokens if reads_batch else hidden
        kept, remade = _compute_activations(layers, recompute, received, integers)
        # The engine clones what a stage receives and keeps both, and the output until its backward pass (`_exec_forward_pass`).
        sizes.append(received + integers + (0 if makes_loss else hidden) + kept)
        recomputation = max(recomputation, remade)
    in_flight = schedule.list_in_flight(stage_id)
    largest = max(layer.largest_trainable for layers in chunks for layer in layers)
    # Receive buffers for activations and gradients, the two gradients that flow through a layer, and one parameter's new gradient.
    in_transit = (
        (0 if is_first else hidden + integers) + (0 if is_last else hidden) + 2 * hidden + (width + 4) * largest
    )
    if not schedule.runs_on_deepspeed:
        # a gradient that was received, what is received for the next pass, and gradients on their way
        in_transit = 2 * hidden + integers + SENDS_IN_FLIGHT * hidden + 2 * hidden + (width + 4) * largest
    return Memory(
        weights=state.weights,
        gradients=state.gradients,
        optimizer=state.optimizer,
        activations=max(sum(count * size for count, size in zip(counts, sizes, strict=True)) for counts in in_flight),
        recomputation=recomputation,
        loss=compute_loss_bytes(tokens * vocab_size, precision) if is_last else 0,
        buffers=state.buffers + in_transit,
        step=state.step,
        host=state.host + HOST_BYTES_A_RANK,
    )


def _compute_activations(
    chunk: Sequence[LayerCost], recompute: ActivationCheckpointing, received: int, integers: int
) -> tuple[int, int]:
    """(what consecutive layers keep of a micro-batch, `Memory.recomputation`). received: bytes of the first layer's input. integers: of
    what all layers take beside it."""
    kept = recomputation = 0
    for group in reversed(
        recompute.list_groups(len(chunk))
    ):  # as the backward pass goes: what later groups kept is free by then
        layers = chunk[group.start : group.stop]
        if not group.is_recomputed:
            kept += sum(layer.saved_bytes for layer in layers)
            continue
        remade = sum(layer.remade_bytes if recompute.is_selective else layer.saved_bytes for layer in layers)
        recomputation = max(recomputation, remade - kept)
        kept += chunk[group.start - 1].output_bytes if group.start else received
        if recompute.is_selective:
            kept += sum(layer.kept_bytes for layer in layers)
    kept += integers if recompute.interval else 0  # which every recomputed group takes too
    return kept, recomputation


def compute_loss_bytes(num_logits: int, precision: Precision) -> int:
    """Peak of `models.losses.cross_entropy` beside the head's gradient. num_logits: B x T x V, every token a target.

    In a piece: logits, in bf16 a copy in fp32, and their log-softmax. Of all: the logits' gradient in bf16. fp16 takes no pieces: its
    peak is in the backward pass, log-softmax, its gradient, and the logits' gradient, in fp32.
    """
    piece = min(num_logits, PIECE)
    return {Precision.fp32: 8 * piece, Precision.bf16: 10 * piece + 2 * num_logits, Precision.fp16: 12 * num_logits}[
        precision
    ]
