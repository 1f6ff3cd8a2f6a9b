"""Replicas: gradients are reduced, and updated weights gathered, over them.

At stage 1 the reduction starts within the last backward passes (`training/engine/gradient_sums.py`).
"""

from __future__ import annotations

from training.config.schema import Device, Offload
from training.cost_terms.cost_term import CostTerm, PlannedRun, Stage, count_distinct
from training.costs.hardware import GB
from training.costs.time import SAME_SHARD, SHARDS, Sent, StepCost
from training.distributed.topology import DATA
from training.engine.deepspeed_config import REDUCE_BUCKET


def compute_reduction(stage: Stage) -> StepCost:
    """Return the cost of reducing gradients, in `gradient_reduce_dtype`, to the ranks that own them, and of the
    all-gather of weights, on a ring.

    Stages 2 and 3 reduce the gradients of each micro-batch; stage 3 gathers the weights for each forward and each
    backward pass.
    """
    run = stage.run
    copied = count_reduce_bytes(run) * _count_rounds(run) / (run.hardware.memory_bandwidth * GB)  # a gradient's seconds
    early = _count_early(stage)
    seconds = copied * (stage.num_trainable - early)
    if run.config.offload_parameters is Offload.cpu:
        seconds += _count_from_host(stage) / (run.hardware.host_link_bandwidth * GB)
    early_sent = Sent({_find_axis(run): _cross(run.layout.num_shards, run.reduce_bytes * early)} if early else {})
    sent = _count_sent(stage)
    return StepCost(
        reduce_seconds=seconds,
        reduce_sent=Sent({axis: nbytes - early_sent.get(axis, 0) for axis, nbytes in sent.items()}),
        early_seconds=copied * early,
        early_sent=early_sent,
        last_share=_count_last_bucket(stage) / early if early else 0,
    )


def _count_early(stage: Stage) -> int:
    """How many gradients are reduced as soon as the last backward pass has completed them, while it runs. None on a
    CPU, which sends with the cores that compute; and not those of weights that another stage adds its own to first."""
    run = stage.run
    if run.config.shards_gradients or run.hardware.device is not Device.cuda or run.layout.num_weight_replicas == 1:
        return 0
    own = {index for indices in stage.indices for index in indices}
    elsewhere = {cost.tied_key for index, cost in enumerate(stage.costs) if index not in own}
    shared = [layer for layer in stage.layers if layer.tied_key and layer.tied_key in elsewhere]
    return stage.num_trainable - count_distinct("num_trainable", shared)


def _count_last_bucket(stage: Stage) -> int:
    """Elements of the bucket that is full when the last backward pass ends, taken to be as large as any."""
    in_pass = max(count_distinct("num_trainable", chunk.layers) for chunk in stage.chunks)
    return min(max(min(in_pass, REDUCE_BUCKET), stage.largest_trainable), _count_early(stage))


def _count_rounds(run: PlannedRun) -> int:
    """How often gradients are reduced in a step."""
    return run.layout.gradient_accumulation_steps if run.config.shards_gradients else 1


def _count_sent(stage: Stage) -> Sent:
    """Bytes that a rank sends in a step; in groups of `sharding_parallel_size`, those over the links of each."""
    run = stage.run
    num_replicas, num_shards = run.layout.num_weight_replicas, run.layout.num_shards
    gradients, weights = run.reduce_bytes * stage.num_trainable, run.weight_bytes * stage.num_trainable
    within = _find_axis(run)
    if run.config.shards_weights:
        weights = 2 * run.layout.gradient_accumulation_steps * run.weight_bytes * stage.num_parameters
    between = _cross(num_replicas // num_shards, 2 * gradients / num_shards)  # groups, once a step
    return Sent({within: _cross(num_shards, _count_rounds(run) * gradients + weights), SAME_SHARD: between})


def _find_axis(run: PlannedRun) -> str:
    """The axis over which optimizer state is sharded."""
    return DATA if run.layout.num_shards == run.layout.num_weight_replicas else SHARDS


def _cross(size: int, nbytes: float) -> float:
    return (size - 1) / size * nbytes


def _count_from_host(stage: Stage) -> float:
    """Bytes of this rank's part of the weights that cross its host's link: for each pass, and back when updated."""
    run = stage.run
    part = run.weight_bytes * stage.num_parameters / run.layout.num_weight_replicas
    return (2 * run.layout.gradient_accumulation_steps + 1) * part


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
