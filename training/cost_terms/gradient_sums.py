"""Sums of gradients over the micro-batches of a step: a walk through memory for each, however small it is.

So a step of many small micro-batches takes longer than one of few large ones, whose gradients are as large.
"""

from __future__ import annotations

from training.config.schema import Device, Offload, Precision
from training.cost_terms.cost_term import Chunk, CostTerm, count_distinct
from training.costs.hardware import GB
from training.costs.memory import bytes_of
from training.costs.time import PassCost


def compute_sums(chunk: Chunk) -> PassCost:
    """Return the time to sum gradients; in layers that were timed it is included in their times."""
    run = chunk.run
    moved = count_sum_bytes(
        run.config.precision,
        run.config.offload_optimizer,
        run.layout.gradient_accumulation_steps,
        run.hardware.device,
    )
    counted = count_distinct("num_trainable", [layer for layer in chunk.layers if layer.pass_seconds is None])
    return PassCost(backward_seconds=moved * counted / (run.hardware.memory_bandwidth * GB))


def count_sum_bytes(precision: Precision, offload: Offload, num_micro_batches: int, device: Device) -> float:
    """Return the bytes read and written per trained parameter to sum its gradients, per micro-batch of
    `num_micro_batches`.

    bf16 (`training/optim/gradient_sums.py`): the gradient is read, 2 bytes, its sum in fp32 read and written, 4 + 4.
    A CPU first writes the gradient in fp32, 2 + 4, and reads that, so it moves 18. (DeepSpeed's own way moves 8 more:
    it sets each gradient to zero, 2, and lets autograd add to that, 2 + 2 + 2.) Offloaded, the first micro-batch's
    in fp32 are the sum.
    fp32 and fp16: autograd reads the gradient and the sum, and writes the sum; the first micro-batch's are the sum.
    """
    if precision is Precision.bf16:
        cast = 2 + 4
        added = (2 + 4 + 4) if device is Device.cuda else cast + (4 + 4 + 4)
        first = added if offload is Offload.none else cast
    else:
        added, first = 3 * bytes_of(precision), 0
    return (first + (num_micro_batches - 1) * added) / num_micro_batches


GRADIENT_SUMS = CostTerm(chunk_cost=compute_sums)
