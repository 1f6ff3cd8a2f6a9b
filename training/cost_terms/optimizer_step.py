"""The optimizer step: bound by the bandwidth of the GPU's memory or, offloaded, the host's."""

from __future__ import annotations

from training.config.schema import Offload, Precision
from training.cost_terms.cost_term import CostTerm, Stage
from training.costs.hardware import GB
from training.costs.memory import bytes_of
from training.costs.time import StepCost
from training.optim.optimizer import count_state_bytes


def compute_update(stage: Stage) -> StepCost:
    """Return the time to update this replica's part; offloaded, its gradient and weight also cross the link to the
    host."""
    run = stage.run
    config, hardware = run.config, run.hardware
    part = stage.num_in_part
    moved = count_update_bytes(count_state_bytes(config), config.precision, config.shards_weights) * part
    if config.offload_optimizer is Offload.none:
        return StepCost(optimizer_seconds=moved / (hardware.memory_bandwidth * GB))
    ranks_on_node = min(run.layout.world_size, hardware.cards_per_node)
    across = (4 + run.weight_bytes) * part / (hardware.host_link_bandwidth * GB)
    return StepCost(optimizer_seconds=across + moved * ranks_on_node / (hardware.host_memory_bandwidth * GB))


def count_update_bytes(state_bytes: float, precision: Precision, shards_weights: bool = False) -> float:
    """Return the bytes that an optimizer step reads and writes per trained parameter, as deepspeed 0.19.8 does it.

    state_bytes: of the optimizer's state per parameter, which it reads and writes.

    The norm reads the gradient, and clipping reads and writes it; fp16 casts it first, stage 3 takes the norm in fp64
    and copies the gradient. Then the gradient is read, master weight and state read and written, and the weight copied
    from its master.
    """
    cast = 2 + 4 if precision is Precision.fp16 else 0
    norm = (4 + 8 + 8) + (4 + 4) if shards_weights else 4
    return cast + norm + (4 + 4) + 4 + (4 + 4) + 2 * state_bytes + 4 + bytes_of(precision)


OPTIMIZER_STEP = CostTerm(stage_cost=compute_update)
