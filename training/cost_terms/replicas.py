"""Replicas: gradients are reduced, and updated weights gathered, over them."""

from __future__ import annotations

from training.config.schema import Offload
from training.cost_terms.cost_term import CostTerm, PlannedRun, Stage, count_distinct
from training.costs.hardware import GB
from training.costs.time import SAME_SHARD, SHARDS, Sent, StepCost
from training.distributed.topology import DATA


def compute_reduction(stage: Stage) -> StepCost:
    """Return the cost of reducing gradients, in `gradient_reduce_dtype`, to the ranks that own them, and of the
    all-gather of weights, on a ring.

    Stages 2 and 3 reduce the gradients of each micro-batch; stage 3 gathers the weights for each forward and each
    backward pass.
    """
    run = stage.run
    copied = count_reduce_bytes(run) * stage.num_trainable * _count_rounds(run)
    seconds = copied / run.hardware.stream_rate
    if run.config.offload_parameters is Offload.cpu:
        seconds += _count_from_host(stage) / (run.hardware.host_link_bandwidth * GB)
    return StepCost(reduce_seconds=seconds, reduce_sent=_count_sent(stage))


def _count_rounds(run: PlannedRun) -> int:
    """How often gradients are reduced in a step."""
    return run.layout.gradient_accumulation_steps if run.config.shards_gradients else 1


def _count_sent(stage: Stage) -> Sent:
    """Bytes that a rank sends in a step; in groups of `sharding_parallel_size`, those over the links of each."""
    run = stage.run
    num_replicas, num_shards = run.layout.num_weight_replicas, run.layout.num_shards
    divided = count_distinct("divided", stage.layers)
    reduced = _count_rounds(run) * run.reduce_bytes + run.weight_bytes
    # Of experts that ranks divide, fewer ranks have the same ones.
    expert_bytes = _cross(num_shards // run.layout.topology.num_expert_shares, reduced * divided)
    num_trainable = stage.num_trainable - divided
    gradients, weights = run.reduce_bytes * num_trainable, run.weight_bytes * num_trainable
    within = DATA if num_shards == num_replicas else SHARDS
    if run.config.shards_weights:
        weights = run.layout.gradient_accumulation_steps * run.weight_bytes * _count_gathered(stage)
    between = _cross(num_replicas // num_shards, 2 * gradients / num_shards)  # groups, once a step
    everywhere = _cross(num_shards, _count_rounds(run) * gradients + weights)
    return Sent({within: everywhere + expert_bytes, SAME_SHARD: between})


def _count_gathered(stage: Stage) -> int:
    """Elements that a micro-batch's passes gather at stage 3: of each layer once, and of those that run a backward pass
    once more."""
    return stage.num_parameters + count_distinct("held", [x for chunk in stage.chunks for x in chunk.backward_layers])


def _cross(size: int, nbytes: float) -> float:
    return (size - 1) / size * nbytes


def _count_from_host(stage: Stage) -> float:
    """Bytes of this rank's part of the weights that cross its host's link: for each pass, and back when updated."""
    run = stage.run
    elements = run.layout.gradient_accumulation_steps * _count_gathered(stage) + stage.num_parameters
    return run.weight_bytes * elements / run.layout.num_weight_replicas


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
        return run.weight_bytes + 4 * sent
    cast = 0 if held == sent else held + sent
    return cast + sent + (cast + 2 * held) / run.layout.num_shards


REPLICAS = CostTerm(stage_cost=compute_reduction)
