"""Context parallelism: the exchange of heads around attention. What it saves is in the costs of layers on a part of the
sequence."""

from __future__ import annotations

from training.distributed.topology import CONTEXT
from training.planner.levers.lever import Chunk, Lever
from training.planner.time import PassCost, Sent


def compute_exchanges(chunk: Chunk) -> PassCost:
    """All but the rank's own part of queries, keys, values and outputs; of recomputed layers once more."""
    size = chunk.run.layout.context_parallel_size
    forward = sum(layer.exchanged_bytes for layer in chunk.layers) * (size - 1) / size
    again = sum(layer.exchanged_bytes for layer in chunk.list_recomputed()) * (size - 1) / size
    return PassCost(forward_sent=Sent({CONTEXT: forward}), backward_sent=Sent({CONTEXT: forward + again}))


CONTEXT_PARALLEL = Lever(chunk_cost=compute_exchanges)
