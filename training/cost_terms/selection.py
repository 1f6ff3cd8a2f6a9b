"""Selections of keys: an indexer's scores and its projections, in each forward pass of its layer.

The scores are products in fp32. One chunk of queries, and with it the bytes that a selection takes, is in the own
record of the layer (`training/costs/trace.py`), which has no more of them.
"""

from __future__ import annotations

from training.config.schema import Precision
from training.cost_terms.cost_term import Chunk, PassCost, PlannedRun
from training.cost_terms.layers import time_kernels
from training.costs.cost import LayerCost
from training.costs.traffic import Traffic

KERNELS_OF_A_CHUNK = 25  # that score a chunk of queries and select its keys


def compute_selection(chunk: Chunk) -> PassCost:
    """Return the cost of the selections of a forward pass, and of those that are made again where layers are
    recomputed."""
    run, again = chunk.run, chunk.list_recomputed()
    made, repeated = (sum(time_selection(layer, run) for layer in layers) for layers in (chunk.layers, again))
    return PassCost(
        forward_flops=sum(count_flops(layer, run) for layer in chunk.layers),
        forward_seconds=made,
        backward_flops=sum(count_flops(layer, run) for layer in again),
        backward_seconds=repeated,
        recomputed_seconds=repeated,
        selection_seconds=made + repeated,
    )


def count_flops(layer: LayerCost, run: PlannedRun) -> float:
    """Return the FLOPs of a token in a layer's selection."""
    made = layer.selection
    return 0.0 if made is None else (made.score_flops + made.projection_flops) / run.tokens


def time_selection(layer: LayerCost, run: PlannedRun) -> float:
    """Return the seconds of a layer's selection; 0 for a layer that was timed as a whole."""
    made, hardware = layer.selection, run.hardware
    if made is None or layer.work.pass_seconds:
        return 0.0
    in_fp32 = hardware.peak_flops.get(Precision.fp32.value, hardware.peak_flops[run.config.precision.value])
    products = made.score_flops / (in_fp32 * hardware.efficiency) + made.projection_flops / run.flops_per_second
    num_kernels = KERNELS_OF_A_CHUNK * max(0, made.num_chunks - 1)
    return time_kernels(products, 0.0, Traffic(made.moved_bytes, num_kernels), hardware)
