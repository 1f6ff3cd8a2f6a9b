"""Tensor parallelism: the sums of hidden states over the ranks that share layers. Its savings are in the costs of the
sharded layers. With sequence parallelism a sum is cut in two, and the input of a block is gathered once more."""

from __future__ import annotations

from training.cost_terms.cost_term import Chunk, CostTerm
from training.costs.time import PassCost, Sent
from training.distributed.topology import TENSOR


def compute_sums(chunk: Chunk) -> PassCost:
    """Return the bytes of all-reduces on a ring; recomputed layers repeat those of their forward pass."""
    size = chunk.run.layout.tensor_parallel_size
    one_sum = 2 * (size - 1) / size * chunk.block_bytes
    forward = sum(layer.forward_sums for layer in chunk.layers)
    again = sum(layer.forward_sums for layer in chunk.list_recomputed())
    backward = sum(layer.backward_sums + layer.regathers / 2 for layer in chunk.layers) + again
    return PassCost(forward_sent=Sent({TENSOR: forward * one_sum}), backward_sent=Sent({TENSOR: backward * one_sum}))


TENSOR_PARALLEL = CostTerm(chunk_cost=compute_sums)
