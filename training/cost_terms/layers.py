"""The layers themselves: their passes, and the gradients that flow through them."""

from __future__ import annotations

from models.adapters.adapter import NF4_SCALE_BYTES
from training.config.schema import Device
from training.cost_terms.cost_term import Chunk, CostTerm, Stage
from training.costs.memory import Memory
from training.costs.time import PassCost


def compute_passes(chunk: Chunk) -> PassCost:
    """Return the cost of the passes: backward is twice forward, less the gradients of frozen matrices, and nothing in
    layers that run none."""
    excess = [chunk.run.time_excess(layer) for layer in chunk.layers]
    excess += [chunk.run.time_excess(layer, is_backward=True) for layer in chunk.backward_layers]
    return PassCost(
        forward_flops=sum(layer.work.forward_flops for layer in chunk.layers),
        backward_flops=sum(layer.work.backward_flops for layer in chunk.backward_layers),
        forward_seconds=sum(map(chunk.time_forward, chunk.layers)),
        backward_seconds=sum(map(chunk.time_backward, chunk.backward_layers)),
        deferred_seconds=sum(map(chunk.time_deferred, chunk.backward_layers)),
        excess_seconds=sum(excess),
    )


def compute_gradients_in_pass(stage: Stage) -> Memory:
    """Return the bytes of the two gradients that flow through a layer, of the largest in flight inside one, and of the
    dequantized weight that makes it."""
    blocks = max(layer.num_blocks for layer in stage.layers)
    dequantized = (stage.run.weight_bytes + NF4_SCALE_BYTES) * max(
        layer.parameters.largest_in_4bit for layer in stage.layers
    )
    return Memory(
        buffers=2 * blocks * stage.chunks[0].block_bytes + count_on_the_way(stage) + round(dequantized),
    )


def count_on_the_way(stage: Stage) -> int:
    """Return the bytes of the gradient where a layer is widest, or of one parameter's new gradient.

    Unless that is in fp32, a CPU copies it to fp32 to add it (`add_gradient`), 4 bytes an element; a GPU casts as it
    adds. Stage 2 copies gradients by buckets (`gradient_sums.py`). The head is not among the widest: its result is in
    the loss.
    """
    layers = stage.layers[:-1] if stage.has_loss else stage.layers
    widest = max((layer.bytes.widest for layer in layers), default=0)
    return max(widest, count_new_gradient(stage, stage.largest_trainable))


def count_new_gradient(stage: Stage, num_elements: int) -> int:
    """Return the bytes of a gradient as autograd makes it, with a CPU's copy in fp32."""
    run = stage.run
    copies = run.weight_bytes < 4 and run.hardware.device is Device.cpu and not run.config.shards_gradients_only
    return (run.weight_bytes + (4 if copies else 0)) * num_elements


LAYERS = CostTerm(stage_memory=compute_gradients_in_pass, chunk_cost=compute_passes)
