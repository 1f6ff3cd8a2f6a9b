"""The layers themselves: their passes, and the gradients on their way through them."""

from __future__ import annotations

from training.planner.levers.lever import Chunk, Lever, Stage
from training.planner.memory import Memory
from training.planner.time import PassCost


def compute_passes(chunk: Chunk) -> PassCost:
    """Backward is twice forward, less the gradients of frozen matrices."""
    return PassCost(
        forward_flops=sum(layer.forward_flops for layer in chunk.layers),
        backward_flops=sum(layer.backward_flops for layer in chunk.layers),
        forward_seconds=sum(map(chunk.time_forward, chunk.layers)),
        backward_seconds=sum(map(chunk.time_backward, chunk.layers)),
        deferred_seconds=sum(map(chunk.time_deferred, chunk.layers)),
    )


def compute_gradients_in_pass(stage: Stage) -> Memory:
    """The two gradients that flow through a layer, one parameter's new gradient, and, unless that is in fp32, 4 bytes
    an element beside it: a CPU's copy of it in fp32, to be added (`add_gradient`); a GPU makes none, and has that much
    for what is not counted.
    """
    hidden, of_weight = stage.chunks[0].block_bytes, stage.run.weight_bytes
    return Memory(buffers=2 * hidden + (of_weight + (4 if of_weight < 4 else 0)) * stage.largest_trainable)


LAYERS = Lever(stage_memory=compute_gradients_in_pass, chunk_cost=compute_passes)
