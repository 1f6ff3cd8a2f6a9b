"""The optimizer step: bound by the bandwidth of the GPU's memory or, offloaded, the host's."""

from __future__ import annotations

import torch

from training.config.precision import DTYPES
from training.config.schema import Device, Offload, OptimizerName, Precision, RunConfig
from training.cost_terms.cost_term import Stage, StepCost
from training.costs.hardware import GB
from training.costs.trace import trace_operators
from training.optim.optimizer import build_optimizer, count_state_bytes, count_update_buffers, updates_at_once


def compute_update(stage: Stage) -> StepCost:
    """Return the time to update this replica's part; offloaded, its gradient and weight also cross the link to the
    host."""
    run, hardware, part = stage.run, stage.run.hardware, stage.num_in_part
    moved = count_moved(run.config, hardware.device is Device.cuda) * part
    if run.config.offload_optimizer is Offload.none:
        return StepCost(optimizer_seconds=moved / hardware.stream_rate)
    ranks_on_node = min(run.layout.world_size, hardware.cards_per_node)
    across = (4 + run.weight_bytes) * part / (hardware.host_link_bandwidth * GB)
    return StepCost(optimizer_seconds=across + moved * ranks_on_node / (hardware.host_memory_bandwidth * GB))


def count_moved(config: RunConfig, has_triton: bool) -> float:
    """Return the bytes that an optimizer step reads and writes per trained parameter. has_triton: as in
    `build_optimizer`; a plan for a GPU takes it for granted."""
    state_bytes = count_state_bytes(config)
    if updates_at_once(config, has_triton):
        return count_bytes_at_once(state_bytes, config.precision)
    moved = count_update_bytes(state_bytes, config.precision, config.shards_weights)
    if not count_update_buffers(config, 1, has_triton):
        return moved
    # Operator by operator, not in one kernel, which reads the gradient, and reads and writes weight and state
    key = config.optimizer.name, config.optimizer.rounds_state
    if key not in _TRACED:
        _TRACED[key] = _trace_update(config)
    return moved - (4 + 8 + 2 * state_bytes) + _TRACED[key]


_TRACED: dict[tuple[OptimizerName, bool], float] = {}  # what `_trace_update` has returned


def _trace_update(config: RunConfig) -> float:
    """Return the bytes that the operators of an update read and write per parameter."""
    weight = torch.nn.Parameter(torch.empty(2**12, device="meta"))
    weight.grad = torch.empty_like(weight)
    optimizer = build_optimizer([{"params": [weight], "lr": 1.0, "weight_decay": 0.0}], config)
    optimizer.step()  # which makes its state
    moved = 0
    for operator in trace_operators(optimizer.step):
        if operator.launches:
            read = operator.taken[1:] if operator.name == "copy_" else operator.taken
            moved += sum({operand.storage: operand.nbytes for operand in read}.values())
            moved += sum(operand.nbytes for operand in operator.made)
    return moved / weight.numel()


def count_bytes_at_once(state_bytes: float, precision: Precision) -> float:
    """Return the bytes of a step that is one pass (training/engine/one_pass_step.py), as `count_update_bytes` does. The
    norm reads the gradient, in fp16 through a copy in fp32. The pass reads gradient, master weight and state, and
    writes the latter two and the weight."""
    gradient = 2 if precision is Precision.fp16 else 4
    norm = gradient + (4 + 4 if precision is Precision.fp16 else 0)
    return norm + gradient + (4 + 4) + 2 * state_bytes + DTYPES[precision].itemsize


def count_update_bytes(state_bytes: float, precision: Precision, shards_weights: bool = False) -> float:
    """Return the bytes that an optimizer step reads and writes per trained parameter, as deepspeed 0.19.8 does it.

    state_bytes: of the optimizer's state per parameter, which it reads and writes.

    The norm reads the gradient, and clipping reads and writes it; fp16 casts it first, stage 3 takes the norm in fp64
    and copies the gradient. Then the gradient is read, master weight and state read and written, and the weight copied
    from its master.
    """
    cast = 2 + 4 if precision is Precision.fp16 else 0
    norm = (4 + 8 + 8) + (4 + 4) if shards_weights else 4
    return cast + norm + (4 + 4) + 4 + (4 + 4) + 2 * state_bytes + 4 + DTYPES[precision].itemsize
