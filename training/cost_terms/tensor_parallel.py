"""Tensor parallelism: the sums of hidden states over the ranks that share layers. Its savings are in the costs of the
sharded layers. With sequence parallelism a sum is cut in two, and the input of a block is gathered once more."""

from __future__ import annotations

from training.cost_terms.cost_term import Chunk, CostTerm
from training.costs.time import PassCost, Sent
from training.distributed.topology import TENSOR


def compute_sums(chunk: Chunk) -> PassCost:
    """Return the bytes and steps of all-reduces on a ring; recomputed layers repeat those of their forward pass."""
    size = chunk.run.layout.tensor_parallel_size
    forward = sum(layer.work.forward_sums for layer in chunk.layers)
    again = sum(layer.work.forward_sums for layer in chunk.list_recomputed())
    again -= sum(layer.work.unrepeated_flops > 0 for layer in chunk.list_stopped())  # the sum behind its last product
    backward = sum(layer.work.backward_sums + layer.work.regathers / 2 for layer in chunk.backward_layers) + again
    return PassCost(forward_sent=_send(forward, chunk, size), backward_sent=_send(backward, chunk, size))


def _send(num_sums: float, chunk: Chunk, size: int) -> Sent:
    steps = num_sums * 2 * (size - 1)
    return Sent({TENSOR: steps / size * chunk.block_bytes}, {TENSOR: steps})


TENSOR_PARALLEL = CostTerm(chunk_cost=compute_sums)
