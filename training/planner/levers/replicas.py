"""Replicas: gradients are reduced, and updated weights gathered, over them."""

from __future__ import annotations

from training.config.schema import Offload, Precision, RunConfig
from training.distributed.topology import DATA
from training.planner.hardware import GB
from training.planner.levers.lever import Lever, Stage
from training.planner.memory import bytes_of
from training.planner.time import Sent, StepCost


def compute_reduction(stage: Stage) -> StepCost:
    """All-reduce of the gradients and all-gather of the weights, on a ring; both in the training dtype."""
    run, dp_size = stage.run, stage.run.layout.num_weight_replicas
    copied = count_reduce_bytes(run.config, dp_size) * stage.num_trainable
    sent = 3 * (dp_size - 1) / dp_size * run.weight_bytes * stage.num_trainable
    return StepCost(reduce_seconds=copied / (run.hardware.memory_bandwidth * GB), reduce_sent=Sent({DATA: sent}))


def count_reduce_bytes(config: RunConfig, dp_size: int) -> int:
    """What is read and written of a gradient to reduce it, beside the sending, as seen of deepspeed 0.19.8's
    operations.

    Flattened, divided and taken back, in bf16 made bf16 for that; nothing of one replica (`skip_averaging`). In fp16,
    or offloaded, put into a bucket before, and taken out of it, also of one replica.
    """
    in_bucket = config.precision is Precision.fp16 or config.offload_optimizer is not Offload.none
    if dp_size == 1 and not in_bucket:
        return 0
    if config.precision is Precision.bf16:
        return 2 * (4 + 4) + 2 * (4 + 2) + (2 + 2)
    return (5 if in_bucket else 3) * 2 * bytes_of(config.precision)


REPLICAS = Lever(stage_cost=compute_reduction)
