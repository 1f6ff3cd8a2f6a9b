"""The time of the passes of each chunk, relative to each other, by which an uneven schedule is ordered.

Counted, not measured, so that all ranks, and the plan, have the same numbers: multiply-adds per token of a layer's
matrices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from training.distributed.topology import Layout
from training.pipeline.schedules import find_schedule
from training.pipeline.zero_bubble import PassTimes

# In addition to its matrices a layer has norms, attention and activation functions; in the backward pass about twice as
# much. Measured on a CPU, Llama layers of 512 at sequence 256.
_OTHER_FORWARD, _OTHER_BACKWARD = 0.1, 0.25


def time_passes(
    layout: Layout,
    work: Sequence[int],
    bounds: Sequence[int],
    *,
    remakes_logits: bool,
    recomputes: bool,
    trains_matrices: bool,
) -> Layout:
    """Return the layout with the times that its schedule is ordered by, where it asks for any.

    work: of each layer, as `compute_work` counts it. bounds: of the layout's chunks. remakes_logits: see `Objective`.
    recomputes: whether backward passes run layers again. trains_matrices: False where only adapters are trained.
    """
    if not find_schedule(layout.schedule).splits_backward:
        return layout
    times = []
    for start, stop in pairwise(bounds):
        head = work[-1] if stop == len(work) else 0
        body = sum(work[start:stop]) - head
        forward = (1 + _OTHER_FORWARD) * body
        # The loss makes the gradients of its logits, and the products with them, while it has the logits
        in_loss, after_loss = (head, 3 * head) if remakes_logits else (3 * head, 0)
        backward = (1 + _OTHER_BACKWARD) * body + (forward if recomputes else 0) + after_loss
        times.append(PassTimes(forward + in_loss, backward, float(body) if trains_matrices else 0.0))
    return replace(layout, pass_times=tuple(times))
