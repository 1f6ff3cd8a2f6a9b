"""Replicas: gradients are reduced, and updated weights gathered, over them."""

from __future__ import annotations

from training.config.schema import Offload, Precision
from training.cost_terms.cost_term import CostTerm, PlannedRun, Stage
from training.costs.hardware import GB
from training.costs.time import SAME_SHARD, SHARDS, Sent, StepCost
from training.distributed.topology import DATA


def compute_reduction(stage: Stage) -> StepCost:
    """Return the cost of the all-reduce of gradients, in `gradient_reduce_dtype`, and the all-gather of weights, on a
    ring.

    Stage 2 reduces the gradients of each micro-batch, to the rank that has them; stage 3 gathers the weights for each
    forward and each backward pass.
    """
    run = stage.run
    copied = count_reduce_bytes(run) * stage.num_trainable
    if run.config.shards_gradients:
        copied *= run.layout.gradient_accumulation_steps
    seconds = copied / (run.hardware.memory_bandwidth * GB)
    if run.config.offload_parameters is Offload.cpu:
        seconds += _count_from_host(stage) / (run.hardware.host_link_bandwidth * GB)
    return StepCost(reduce_seconds=seconds, reduce_sent=_count_sent(stage))


def _count_sent(stage: Stage) -> Sent:
    """Bytes that a rank sends in a step; in groups of `sharding_parallel_size`, those over the links of each."""
    run = stage.run
    num_replicas, num_shards = run.layout.num_weight_replicas, run.layout.num_shards
    gradients, weights = run.reduce_bytes * stage.num_trainable, run.weight_bytes * stage.num_trainable
    summed, num_micro_batches = 2 * gradients, run.layout.gradient_accumulation_steps
    within = DATA if num_shards == num_replicas else SHARDS
    if not run.config.shards_gradients:
        return Sent({DATA: _cross(num_replicas, summed)}) + Sent({within: _cross(num_shards, weights)})
    if run.config.shards_weights:
        weights = 2 * num_micro_batches * run.weight_bytes * stage.num_parameters
    between = _cross(num_replicas // num_shards, summed / num_shards)  # groups, once a step
    return Sent({within: _cross(num_shards, num_micro_batches * gradients + weights), SAME_SHARD: between})


def _cross(size: int, nbytes: float) -> float:
    return (size - 1) / size * nbytes


def _count_from_host(stage: Stage) -> float:
    """Bytes of this rank's part of the weights that cross its host's link: for each pass, and back when updated."""
    run = stage.run
    part = run.weight_bytes * stage.num_parameters / run.layout.num_weight_replicas
    return (2 * run.layout.gradient_accumulation_steps + 1) * part


def count_reduce_bytes(run: PlannedRun) -> int:
    """Return the bytes read and written per gradient to reduce it, without sending, as deepspeed 0.19.8 does it.

    Flattened, divided and taken back, cast to what it is sent in and back where that is another dtype; nothing of one
    replica (`skip_averaging`). In fp16, or offloaded, put into a bucket before, and taken out of it, also of one
    replica.
    """
    in_bucket = run.config.precision is Precision.fp16 or run.config.offload_optimizer is not Offload.none
    if run.layout.num_weight_replicas == 1 and not in_bucket:
        return 0
    if run.config.shards_gradients_only:
        # for each micro-batch: read, written to its bucket, sent, and received where it goes
        return run.weight_bytes + 4 * run.reduce_bytes
    held, sent = run.gradient_bytes, run.reduce_bytes
    cast = 0 if held == sent else 2 * (held + sent)
    return (4 if in_bucket else 2) * 2 * held + cast + 2 * sent


REPLICAS = CostTerm(stage_cost=compute_reduction)
