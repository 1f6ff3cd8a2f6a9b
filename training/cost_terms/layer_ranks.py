"""The ranks that have a layer together send to each other: sums of hidden states by tensor parallelism, rows and their
results by expert parallelism. The savings of both, and the time of the most loaded rank's experts, are in the costs of
the layers, which are sharded."""

from __future__ import annotations

from training.config.schema import CheckpointMode
from training.cost_terms.cost_term import Chunk, PassCost
from training.costs.hardware import GB
from training.costs.links import Sent, find_bandwidth, find_latency
from training.distributed.topology import EXPERTS, TENSOR


def compute_sums(chunk: Chunk) -> PassCost:
    """Return the cost of all-reduces on a ring, each of 2 (t - 1) steps over t ranks; recomputed layers repeat those of
    their forward pass. With sequence parallelism a sum is cut in two, and the input of a block is gathered once
    more."""
    size = chunk.run.layout.tensor_parallel_size
    forward = sum(layer.work.forward_sums for layer in chunk.layers)
    again = sum(layer.work.forward_sums for layer in chunk.list_recomputed())
    again -= sum(layer.work.unrepeated_flops > 0 for layer in chunk.list_stopped())  # the sum behind its last product
    backward = sum(layer.work.backward_sums + layer.work.regathers / 2 for layer in chunk.backward_layers) + again
    steps = forward * 2 * (size - 1), backward * 2 * (size - 1)
    return _send(chunk, TENSOR, (steps[0] / size * chunk.block_bytes, steps[1] / size * chunk.block_bytes), steps)


def compute_exchanges(chunk: Chunk) -> PassCost:
    """Return the cost of sending rows to their experts, and results back, in each pass, of the rank with most
    (`moe.imbalance`). Layers that are recomputed repeat the exchanges of their forward pass, but under `selective`,
    which keeps what has arrived."""
    run, size = chunk.run, chunk.run.layout.topology.num_expert_shares
    keeps = run.config.activation_checkpoint_mode is CheckpointMode.selective
    again = [] if keeps else chunk.list_recomputed()
    there_and_back = run.config.moe.imbalance * (size - 1) / size * 2 * chunk.block_bytes
    forward, backward = (
        there_and_back * sum(layer.work.sent_rows for layer in layers)
        for layers in (chunk.layers, [*chunk.backward_layers, *again])
    )
    return _send(chunk, EXPERTS, (forward, backward))


def _send(chunk: Chunk, axis: str, nbytes: tuple[float, float], steps: tuple[float, float] = (0, 0)) -> PassCost:
    """nbytes, steps: of the forward and the backward pass."""
    if not any(nbytes):
        return PassCost()
    link = axis, chunk.run.layout, chunk.stage_id, chunk.run.hardware
    rate, latency = find_bandwidth(*link) * GB, find_latency(*link)
    forward, backward = (count * latency + each / rate for count, each in zip(steps, nbytes, strict=True))
    return PassCost(
        forward_seconds=forward,
        backward_seconds=backward,
        sending_seconds=forward + backward,
        sent=Sent({axis: sum(nbytes)}),
    )
