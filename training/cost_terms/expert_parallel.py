"""Expert parallelism: the exchanges of rows with the ranks that have their experts. Its savings, and the time of the
most loaded rank's experts, are in the costs of the layers, whose experts are divided."""

from __future__ import annotations

from collections.abc import Sequence

from training.config.schema import CheckpointMode
from training.cost_terms.cost_term import Chunk, CostTerm
from training.costs.cost import LayerCost
from training.costs.time import PassCost, Sent
from training.distributed.topology import EXPERTS


def compute_exchanges(chunk: Chunk) -> PassCost:
    """Return the bytes of rows and results, there and back in each pass, of the rank with most (`moe.imbalance`).
    Layers that are recomputed repeat the exchanges of their forward pass, but under `selective`, which keeps what has
    arrived."""
    keeps = chunk.run.config.activation_checkpoint_mode is CheckpointMode.selective
    again = [] if keeps else chunk.list_recomputed()
    return PassCost(
        forward_sent=Sent({EXPERTS: _count_sent(chunk, chunk.layers)}),
        backward_sent=Sent({EXPERTS: _count_sent(chunk, [*chunk.backward_layers, *again])}),
    )


def _count_sent(chunk: Chunk, layers: Sequence[LayerCost]) -> float:
    """Bytes of hidden states in a forward pass: each row to its expert, and its result back."""
    size, imbalance = chunk.run.layout.topology.num_expert_shares, chunk.run.config.moe.imbalance
    return imbalance * (size - 1) / size * 2 * chunk.block_bytes * sum(layer.work.sent_rows for layer in layers)


EXPERT_PARALLEL = CostTerm(chunk_cost=compute_exchanges)
