"""Model states: weights, gradients and optimizer under ZeRO (1910.02054).

Stage 1: whole weights and sums of gradients on each rank, fp32 master weights and moments cut into dp parts. Stage 2
cuts the sums of gradients too, stage 3 the weights. Below stage 3 the sums are the project's
(`training/engine/gradient_sums.py`), all else as DeepSpeed 0.19.8 allocates it.
docs/plan.md names the lines behind each term.

n trainable parameters of the stage, dp replicas.
"""

from __future__ import annotations

from training.config.schema import Device, Offload, Precision
from training.cost_terms.buffers import count_on_the_way
from training.cost_terms.cost_term import Chunk, Memory, Stage, count_distinct, find_largest
from training.engine.deepspeed_config import MAX_LIVE, REDUCE_BUCKET
from training.engine.reduce_buckets import reduces_in_passes
from training.optim.optimizer import count_state_bytes, count_update_buffers, updates_at_once


def compute_model_states(stage: Stage) -> Memory:
    """Return the bytes of weights, gradients, optimizer state and the optimizer step of a stage."""
    config, part = stage.run.config, stage.num_in_part
    moments = round(count_state_bytes(config) * part)
    if config.shards_weights:
        return Memory(optimizer=4 * part + moments) + _allocate_zero3(stage)
    if config.offload_optimizer is Offload.cpu:
        held = _allocate_on_host(stage, moments)
    else:
        held = Memory(optimizer=4 * part + moments)
    return Memory(weights=stage.weight_bytes) + held + _allocate_sums(stage)


def _allocate_sums(stage: Stage) -> Memory:
    """`training/engine/gradient_sums.py`: the sums of gradients, at stage 2 this rank's part and the whole ones of
    weights that stages share, and a bucket that is reduced. In fp16 DeepSpeed's step copies the part in fp32. On a CPU
    gloo copies the weights that it gathers after it."""
    run, part = stage.run, stage.num_in_part
    has_triton = run.hardware.device is Device.cuda
    copies = run.config.precision is Precision.fp16 and not updates_at_once(run.config, has_triton)
    copied = 4 * part if copies else 0
    updated = 0 if run.config.offload_optimizer is Offload.cpu else count_update_buffers(run.config, part, has_triton)
    gathers = run.hardware.device is Device.cpu and run.layout.num_shards > 1
    gathered = run.weight_bytes * stage.num_trainable if gathers else 0
    shared = [layer for layer in stage.layers if stage.shares(layer) and run.layout.num_shards > 1]
    summed = part + count_distinct("trained", shared) if run.config.shards_gradients else stage.num_trainable
    return Memory(
        gradients=run.gradient_bytes * summed,
        buffers=max(_count_in_buckets(stage, chunk) for chunk in stage.chunks) if run.layout.num_shards > 1 else 0,
        step=max(copied, updated, gathered),
    )


def _count_in_buckets(stage: Stage, chunk: Chunk) -> int:
    """The bytes by which a bucket, and its copy to be reduced, exceed what the backward pass has freed when it is full,
    and the gradients that `buffers.py` counts. At stage 1 a bucket is of sums that are there anyway, and is copied only
    where it is cast. What stages share is summed whole, and reduced after the passes.

    Where layers are recomputed, a bucket is full while one is, but for one that takes all and waits for the end of the
    pass. All wait for it where they may not be reduced within the pass.
    """
    layers = [layer for layer in chunk.backward_layers if not stage.shares(layer)]
    run, n = stage.run, count_distinct("trained", layers)
    held, copy_bytes, on_the_way = run.weight_bytes, run.reduce_bytes, count_on_the_way(stage)
    if not run.config.shards_gradients:
        held, copy_bytes = 0, 0 if run.reduce_bytes == run.gradient_bytes else run.reduce_bytes
    in_bucket = max(min(n, REDUCE_BUCKET), find_largest(layers))
    has_experts = any(layer.parameters.active < layer.parameters.held for layer in chunk.layers)
    if not reduces_in_passes(run.layout, has_experts):
        return max(0, held * n + copy_bytes * in_bucket - on_the_way)
    if run.config.activation_checkpoint_interval:
        freed = _count_recomputed(chunk) if n <= REDUCE_BUCKET else 0
        return max(0, held * in_bucket + max(0, copy_bytes * in_bucket - freed) - on_the_way)
    most = waiting = freed = 0
    for number, layer in reversed(list(enumerate(layers))):
        waiting += layer.parameters.trained
        in_bucket = max(min(waiting, REDUCE_BUCKET), layer.parameters.largest_trained)
        is_full = waiting >= REDUCE_BUCKET or number == 0
        share = in_bucket / waiting if waiting else 1  # of the layer, that is done when the bucket is full
        taken = (held + is_full * copy_bytes) * in_bucket
        most = max(most, taken - on_the_way - freed - round(share * layer.bytes.saved))
        freed += layer.bytes.saved
        waiting %= REDUCE_BUCKET
    return most


def _count_recomputed(chunk: Chunk) -> int:
    """Bytes of the activations of the group of layers that has most."""
    groups = (chunk.layers[group.start : group.stop] for group in chunk.groups)
    return max((sum(layer.bytes.saved for layer in group) for group in groups), default=0)


def _allocate_zero3(stage: Stage) -> Memory:
    """`zero/stage3.py`: sums of gradients in fp32, this rank's part; in bf16 a bucket, allocated whole
    (`ipg_buckets`). At the step the part is flattened once more. Where layers are recomputed, gradients
    are flattened and cast to be reduced while that takes most, but for few that wait for the end of the pass; where
    nothing is, the later layers have been freed.

    A rank has its part of the weights, and those of the layers at work, up to `MAX_LIVE` elements; where nothing is
    recomputed a backward pass needs all of them, and they stay. With `offload_parameters` its part is in the host's
    memory, pinned for a GPU.
    """
    run, part, num_weights = stage.run, stage.num_in_part, stage.num_parameters
    is_fp32, recomputes = run.config.precision is Precision.fp32, run.config.activation_checkpoint_interval > 0
    reduced = 0
    if recomputes:
        in_bucket = max(min(stage.num_trainable, REDUCE_BUCKET), find_largest(stage.layers))
        freed = _count_recomputed(stage.chunks[0]) if stage.num_trainable <= REDUCE_BUCKET else 0
        reduced = max(0, (run.weight_bytes + (4 if is_fp32 else 0)) * in_bucket - freed)
    own = run.weight_bytes * -(-num_weights // run.layout.num_weight_replicas)
    is_on_host = run.config.offload_parameters is Offload.cpu
    return Memory(
        weights=0 if is_on_host else own,
        host=run.pin(own) if is_on_host else 0,
        gradients=4 * part,
        buffers=run.weight_bytes * (min(num_weights, MAX_LIVE) if recomputes else num_weights)
        + (0 if is_fp32 else run.reduce_bytes * REDUCE_BUCKET)
        + reduced,
        step=4 * part + count_update_buffers(run.config, part, run.hardware.device is Device.cuda),
    )


def _allocate_on_host(stage: Stage, moments: int) -> Memory:
    """`DeepSpeedZeroOptimizer` with its state on the host: moments, master weights, gradient and the weights to send
    back. A GPU also has a buffer for the largest gradient, which nothing is written to, and the host one. Norms and
    biases, of which DeepSpeed pins a few MB separately, count as matrices."""
    run, part = stage.run, stage.num_in_part
    one_gradient = run.weight_bytes * find_largest(stage.layers) if run.hardware.device is Device.cuda else 0
    pinned = (4 * part, 4 * part, run.weight_bytes * part, one_gradient)
    return Memory(buffers=one_gradient, host=moments + sum(map(run.pin, pinned)))
