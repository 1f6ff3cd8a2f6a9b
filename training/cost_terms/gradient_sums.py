"""Sums of gradients over the micro-batches of a step: a walk through memory for each, however small it is.

So a step of many small micro-batches takes longer than one of few large ones, whose gradients are as large.
"""

from __future__ import annotations

from training.config.schema import Device, Precision
from training.cost_terms.cost_term import Chunk, CostTerm, count_distinct
from training.costs.memory import bytes_of
from training.costs.time import PassCost


def compute_sums(chunk: Chunk) -> PassCost:
    """Return the time to sum gradients; in layers that were timed it is included in their times."""
    run = chunk.run
    moved = count_sum_bytes(
        run.config.precision,
        run.layout.gradient_accumulation_steps,
        run.hardware.device,
    )
    counted = count_distinct("trained", [layer for layer in chunk.layers if layer.work.pass_seconds is None])
    return PassCost(backward_seconds=moved * counted / run.hardware.stream_rate)


def count_sum_bytes(precision: Precision, num_micro_batches: int, device: Device) -> float:
    """Return the bytes read and written per trained parameter to sum its gradients, per micro-batch of
    `num_micro_batches`. The first one is copied to its sum (`training/engine/gradient_sums.py`).

    bf16: the gradient is read, 2 bytes, its sum in fp32 read and written, 4 + 4. A CPU first writes the gradient in
    fp32, 2 + 4, and reads that, so it moves 18.
    fp32 and fp16: autograd reads the gradient and the sum, and writes the sum.
    """
    if precision is Precision.bf16:
        first, added = 2 + 4, 2 + 4 + 4
        if device is not Device.cuda:
            added += 4 + 4
    else:
        first, added = 2 * bytes_of(precision), 3 * bytes_of(precision)
    return (first + (num_micro_batches - 1) * added) / num_micro_batches


GRADIENT_SUMS = CostTerm(chunk_cost=compute_sums)
