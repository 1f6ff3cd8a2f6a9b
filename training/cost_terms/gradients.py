"""Gradients: summed over the micro-batches of a step, and reduced over replicas, which updated weights are gathered
over.

A sum is a walk through memory for each micro-batch, however small it is, so a step of many small ones takes longer than
one of few large ones, whose gradients are as large.
"""

from __future__ import annotations

from training.config.schema import Device, Offload, Precision
from training.cost_terms.cost_term import Chunk, PassCost, PlannedRun, Stage, StepCost, count_distinct
from training.costs.hardware import GB
from training.costs.links import SAME_SHARD, SHARDS, Sent
from training.distributed.topology import DATA


def compute_sums(chunk: Chunk) -> PassCost:
    """Return the time to sum gradients; in layers that were timed it is included in their times. Stage 2 adds them up
    where they are reduced."""
    run = chunk.run
    if run.config.shards_gradients_only and run.layout.num_shards > 1:
        return PassCost()
    moved = count_sum_bytes(run.config.precision, run.layout.gradient_accumulation_steps, run.hardware.device)
    counted = count_distinct("trained", [layer for layer in chunk.layers if layer.work.pass_seconds is None])
    return PassCost(backward_seconds=moved * counted / run.hardware.stream_rate)


def count_sum_bytes(precision: Precision, num_micro_batches: int, device: Device) -> float:
    """Return the bytes read and written per trained parameter to sum its gradients, per micro-batch of
    `num_micro_batches`. The first one is copied to its sum (`training/engine/gradient_sums.py`).

    bf16: the gradient is read, 2 bytes, its sum in fp32 read and written, 4 + 4. A CPU first writes the gradient in
    fp32, 2 + 4, and reads that, so it moves 18.
    fp32 and fp16: autograd reads the gradient and the sum, and writes the sum.
    """
    first, added = {
        Precision.bf16: (2 + 4, 2 + 4 + 4 + (0 if device is Device.cuda else 4 + 4)),
        Precision.fp16: (2 + 2, 2 + 2 + 2),
        Precision.fp32: (4 + 4, 4 + 4 + 4),
    }[precision]
    return (first + (num_micro_batches - 1) * added) / num_micro_batches


def compute_reduction(stage: Stage) -> StepCost:
    """Return the cost of reducing gradients, in `gradient_reduce_dtype`, to the ranks that own them, and of the
    all-gather of weights, on a ring.

    Stages 2 and 3 reduce the gradients of each micro-batch; stage 3 gathers the weights for each forward and each
    backward pass, and where a rank's part of them is in its host's memory, that crosses the host's link for each pass,
    and back when updated.
    """
    run, layout, config = stage.run, stage.run.layout, stage.run.config
    num_rounds = layout.gradient_accumulation_steps if config.shards_gradients else 1  # of reductions in a step
    # Elements that the passes of a step gather at stage 3: of each layer once per micro-batch, and of those that run a
    # backward pass once more
    backward = [layer for chunk in stage.chunks for layer in chunk.backward_layers]
    gathered = layout.gradient_accumulation_steps * (stage.num_parameters + count_distinct("held", backward))
    seconds = count_reduce_bytes(run) * stage.num_trainable * num_rounds / run.hardware.stream_rate
    if config.offload_parameters is Offload.cpu:
        crossing = run.weight_bytes * (gathered + stage.num_parameters) / layout.num_weight_replicas
        seconds += crossing / (run.hardware.host_link_bandwidth * GB)

    # Bytes that a rank sends in a step; in groups of `sharding_parallel_size`, those over the links of each. Of experts
    # that ranks divide, fewer ranks have the same ones.
    num_replicas, num_shards = layout.num_weight_replicas, layout.num_shards
    divided = count_distinct("divided", stage.layers)
    num_same = num_shards // layout.topology.num_expert_shares
    expert_bytes = _cross(num_same, (num_rounds * run.reduce_bytes + run.weight_bytes) * divided)
    gradients = run.reduce_bytes * (stage.num_trainable - divided)
    weights = run.weight_bytes * (gathered if config.shards_weights else stage.num_trainable - divided)
    within = _cross(num_shards, num_rounds * gradients + weights) + expert_bytes
    between = _cross(num_replicas // num_shards, 2 * gradients / num_shards)  # groups, once a step
    axis = DATA if num_shards == num_replicas else SHARDS
    return StepCost(reduce_seconds=seconds, reduce_sent=Sent({axis: within, SAME_SHARD: between}))


def _cross(size: int, nbytes: float) -> float:
    """The bytes that each of `size` ranks sends on a ring."""
    return (size - 1) / size * nbytes


def count_reduce_bytes(run: PlannedRun) -> float:
    """Return the bytes read and written per gradient to reduce it once, without sending.

    Below stage 3 (`training/engine/gradient_sums.py`): cast to what it is sent in where that is another dtype, and at
    stage 2 written to its bucket; read; and by its owner put where it goes, and divided. Nothing of one replica.
    Stage 3, as deepspeed 0.19.8 does it: flattened, divided and taken back, and cast there and back.
    """
    if run.layout.num_weight_replicas == 1:
        return 0
    held, sent = run.gradient_bytes, run.reduce_bytes
    if run.config.shards_weights:
        return 4 * held + (0 if held == sent else 2 * (held + sent)) + 2 * sent
    if run.config.shards_gradients:
        return run.weight_bytes + 2 * sent + 3 * sent / run.layout.num_shards
    cast = 0 if held == sent else held + sent
    return cast + sent + (cast + 2 * held) / run.layout.num_shards
