"""Model states: weights, gradients and optimizer under ZeRO (1910.02054), as DeepSpeed 0.19.8 allocates them.

Stage 1: whole weights and sums of gradients on each rank, fp32 master weights and moments cut into dp parts. Stage 2
cuts the sums of gradients too, stage 3 the weights. Which of DeepSpeed's two optimizers runs, and whether its gradients
go through buckets, follows from precision and offload.
docs/plan.md names the lines behind each term.

n trainable parameters of the stage, dp replicas.
"""

from __future__ import annotations

import dataclasses

from training.config.schema import Device, Offload, Precision
from training.cost_terms.cost_term import Chunk, CostTerm, Stage, count_distinct
from training.cost_terms.layers import count_on_the_way
from training.costs.memory import Memory
from training.distributed.pinned_memory import pinned_bytes
from training.engine.deepspeed_config import MAX_LIVE, REDUCE_BUCKET
from training.optim.optimizer import count_state_bytes, count_update_buffers

ALLREDUCE_BUCKET = (
    500_000_000  # elements that `BF16_Optimizer` reduces by: MEMORY_OPT_ALLREDUCE_SIZE of runtime/pipe/engine.py
)


def compute_model_states(stage: Stage) -> Memory:
    """Return the bytes of weights, gradients, optimizer state and the optimizer step of a stage."""
    config = stage.run.config
    held = Memory(optimizer=4 * _part(stage) + _moments(stage))
    if config.shards_weights:
        return held + _allocate_zero3(stage)
    weights = Memory(weights=stage.run.weight_bytes * stage.num_parameters)
    if config.shards_gradients:
        return weights + held + _allocate_zero2(stage)
    if config.offload_optimizer is Offload.cpu:
        return weights + _allocate_on_host(stage)
    allocate = {Precision.bf16: _allocate_bf16, Precision.fp32: _allocate_fp32, Precision.fp16: _allocate_fp16}
    allocated = allocate[config.precision](stage)
    step = max(allocated.step, count_update_buffers(config, _part(stage)))  # gradients are reduced by then
    return weights + held + dataclasses.replace(allocated, step=step)


def _allocate_zero2(stage: Stage) -> Memory:
    """`training/engine/sharded_sums.py`: sums of gradients in fp32, this rank's part, and buckets of a micro-batch's
    own. The step takes the norm of each parameter's in fp64."""
    run, part, largest = stage.run, _part(stage), stage.largest_trainable
    return Memory(
        gradients=4 * part,
        buffers=max(_count_in_buckets(stage, chunk) for chunk in stage.chunks),
        step=max(8 * min(part, largest), count_update_buffers(run.config, part)),
    )


def _count_in_buckets(stage: Stage, chunk: Chunk) -> int:
    """The bytes by which a bucket, and its copy to be reduced, exceed what the backward pass has freed when it is full,
    and the gradients that `layers.py` counts.

    Where layers are recomputed, a bucket is full while one is, but for one that takes all and waits for the end of the
    pass.
    """
    run, n = stage.run, count_distinct("num_trainable", chunk.layers)
    on_the_way = count_on_the_way(stage)
    if run.config.activation_checkpoint_interval:
        in_bucket = max(min(n, REDUCE_BUCKET), stage.largest_trainable)
        copied = run.reduce_bytes * in_bucket
        if n <= REDUCE_BUCKET:
            copied = max(0, copied - _count_recomputed(chunk))
        return max(0, run.weight_bytes * in_bucket + copied - on_the_way)
    most = waiting = freed = 0
    for layer in reversed(chunk.layers):
        waiting += layer.num_trainable
        in_bucket = max(min(waiting, REDUCE_BUCKET), layer.largest_trainable)
        is_full = waiting >= REDUCE_BUCKET or layer is chunk.layers[0]
        share = in_bucket / waiting if waiting else 1  # of the layer, that is done when the bucket is full
        taken = (run.weight_bytes + is_full * run.reduce_bytes) * in_bucket
        most = max(most, taken - on_the_way - freed - round(share * layer.saved_bytes))
        freed += layer.saved_bytes
        waiting %= REDUCE_BUCKET
    return most


def _count_recomputed(chunk: Chunk) -> int:
    """Bytes of the activations of the group of layers that has most."""
    groups = (chunk.layers[group.start : group.stop] for group in chunk.checkpointing.list_groups(len(chunk.layers)))
    return max(sum(layer.saved_bytes for layer in group) for group in groups)


def _allocate_zero3(stage: Stage) -> Memory:
    """`zero/stage3.py`: sums of gradients in fp32, this rank's part; in bf16 a bucket, allocated whole
    (`ipg_buckets`). At the step the part is flattened once more. Where layers are recomputed, gradients
    are flattened and cast to be reduced while that takes most, but for few that wait for the end of the pass; where
    nothing is, the later layers have been freed.

    A rank has its part of the weights, and those of the layers at work, up to `MAX_LIVE` elements; where nothing is
    recomputed a backward pass needs all of them, and they stay. With `offload_parameters` its part is in the host's
    memory, pinned for a GPU.
    """
    run, part = stage.run, _part(stage)
    in_bucket = max(min(stage.num_trainable, REDUCE_BUCKET), stage.largest_trainable)
    is_fp32, recomputes = run.config.precision is Precision.fp32, run.config.activation_checkpoint_interval > 0
    bucket = 0 if is_fp32 else run.reduce_bytes * REDUCE_BUCKET
    num_weights = stage.num_parameters
    gathered = run.weight_bytes * (min(num_weights, MAX_LIVE) if recomputes else num_weights)
    reduced = (run.weight_bytes + (4 if is_fp32 else 0)) * in_bucket
    if stage.num_trainable <= REDUCE_BUCKET:
        reduced = max(0, reduced - _count_recomputed(stage.chunks[0]))
    own = run.weight_bytes * -(-num_weights // run.layout.num_weight_replicas)
    is_on_host = run.config.offload_parameters is Offload.cpu
    pinned = pinned_bytes(own) if run.hardware.device is Device.cuda else own
    return Memory(
        weights=0 if is_on_host else own,
        host=pinned if is_on_host else 0,
        gradients=4 * part,
        buffers=gathered + bucket + (reduced if recomputes else 0),
        step=4 * part + count_update_buffers(run.config, part),
    )


def _allocate_bf16(stage: Stage) -> Memory:
    """`BF16_Optimizer`: the sum of gradients in fp32; a micro-batch's own enter it as they arrive (`layers.py` has the
    one in flight). Between replicas the sum is flattened first where matrices and vectors together fill less than one
    bucket, and cast to bf16 where it is reduced in that."""
    n = stage.num_trainable
    copies = _cast_bytes(stage) * n + (4 * n if n <= ALLREDUCE_BUCKET else 0)
    return Memory(gradients=4 * n, step=copies if stage.run.layout.num_weight_replicas > 1 else 0)


def _allocate_fp32(stage: Stage) -> Memory:
    """`DeepSpeedZeroOptimizer` without buckets: as many gradients as one has places for are flattened, and cast, then
    all of this rank's part is flattened."""
    n = stage.num_trainable
    reduced = (4 + _cast_bytes(stage)) * max(min(n, REDUCE_BUCKET), stage.largest_trainable)
    return Memory(gradients=4 * n, step=max(4 * _part(stage), reduced))


def _allocate_fp16(stage: Stage) -> Memory:
    """`DeepSpeedZeroOptimizer`: gradients leave their bucket for this rank's part, which is then copied in fp32."""
    part, in_bucket = _part(stage), min(stage.num_trainable, REDUCE_BUCKET)
    waiting, filling = _buckets(stage, element=2)
    step = max(filling + 2 * part + (_cast_bytes(stage) - 2) * in_bucket, (4 + 2) * part)
    return Memory(gradients=2 * stage.num_trainable, buffers=waiting, step=step)


def _allocate_on_host(stage: Stage) -> Memory:
    """`DeepSpeedZeroOptimizer` with its state on the host: gradients leave their bucket for it.

    In bf16 gradients are summed in fp32; a bucket is copied, cast where it is reduced in bf16, and copied again, this
    rank's part of it (training/engine/zero_patches.py). A matrix larger than a bucket is reduced by itself. A GPU also
    has a buffer for the largest gradient, which a CPU never writes to.
    """
    run, n, part = stage.run, stage.num_trainable, _part(stage)
    in_bucket, largest = min(n, REDUCE_BUCKET), stage.largest_trainable
    is_bf16 = run.config.precision is Precision.bf16
    element = 4 if is_bf16 else run.weight_bytes

    def copy(reduced: int) -> int:
        return (4 + _cast_bytes(stage)) * reduced + 4 * min(part, reduced) if is_bf16 else 0

    waiting, filling = _buckets(stage, element)
    alone = copy(largest) if largest > REDUCE_BUCKET else 0
    one_gradient = run.weight_bytes * largest if run.hardware.device is Device.cuda else 0
    return Memory(
        gradients=element * n,
        buffers=waiting + one_gradient,
        step=filling + max(copy(in_bucket) - element * in_bucket, alone),
        host=_moments(stage) + _pin(stage),
    )


def _pin(stage: Stage) -> int:
    """Bytes of the host for master weights, gradient and the weights to send back; with a GPU all are pinned, and a
    buffer for the largest gradient too. Norms and biases, of which DeepSpeed pins a few MB separately, count as
    matrices.
    """
    part, element = _part(stage), stage.run.weight_bytes
    tensors = [4 * part, 4 * part, element * part]
    if stage.run.hardware.device is not Device.cuda:
        return sum(tensors)
    return sum(pinned_bytes(nbytes) for nbytes in [*tensors, element * stage.largest_trainable])


def _buckets(stage: Stage, element: int) -> tuple[int, int]:
    """Bytes of (the bucket that is there from the first backward pass on, the one that is filled at the step).

    Buckets hold the bytes of what is put in. A GPU's allocator gives a whole one at once, a CPU only the pages that are
    written.
    """
    if stage.run.hardware.device is Device.cuda:
        return element * REDUCE_BUCKET, element * REDUCE_BUCKET
    return 0, element * min(stage.num_trainable, REDUCE_BUCKET)


def _cast_bytes(stage: Stage) -> int:
    """Bytes per element of a gradient's copy in the dtype that it is reduced in, where that is not its own."""
    return 0 if stage.run.reduce_bytes == stage.run.gradient_bytes else stage.run.reduce_bytes


def _part(stage: Stage) -> int:
    """Elements of this rank's part."""
    return -(-stage.num_trainable // stage.run.layout.num_shards)


def _moments(stage: Stage) -> int:
    return round(count_state_bytes(stage.run.config) * _part(stage))


MODEL_STATES = CostTerm(stage_memory=compute_model_states)
