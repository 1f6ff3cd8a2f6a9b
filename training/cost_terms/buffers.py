"""Buffers of a GPU: messages between stages, and the gradients that flow through a layer."""

from __future__ import annotations

from collections.abc import Sequence

from training.config.schema import Device
from training.cost_terms.cost_term import Chunk, Memory, Stage
from training.costs.cost import LayerCost
from training.pipeline.schedule import UnitKind

SENDS = 2  # gradients on their way to another rank


def compute_messages(stage: Stage) -> Memory:
    """Return the bytes in transfer: received for the next pass or the running one, and gradients that are being
    sent."""
    hidden, integers = stage.chunks[0].hidden_bytes, stage.chunks[0].integer_bytes
    links = stage.run.schedule.list_links()
    gets = {kind for kind, _, stop in links if stop == stage.stage_id}
    sends = {kind for kind, start, _ in links if start == stage.stage_id}
    following = hidden + integers if UnitKind.forward in gets else hidden
    running = hidden if UnitKind.backward in gets else 0
    sent = SENDS * hidden if UnitKind.backward in sends else 0
    return Memory(buffers=following + running + sent if gets else 0)


def compute_gradients_in_pass(stage: Stage) -> Memory:
    """Return the bytes of the two gradients that flow through a layer, of the largest in flight inside one, and of the
    dequantized weight that makes it."""
    dequantized = max(layer.parameters.dequantized_bytes for layer in stage.layers)
    return Memory(buffers=2 * count_flowing(stage.layers, stage.chunks[0]) + count_on_the_way(stage) + dequantized)


def count_flowing(layers: Sequence[LayerCost], chunk: Chunk) -> int:
    """Return the bytes of the gradient that flows into or out of a layer."""
    return max(layer.num_blocks for layer in layers) * chunk.block_bytes


def count_on_the_way(stage: Stage | Chunk) -> int:
    """Return the bytes of the gradient where a layer is widest, or of one parameter's new gradient.

    Unless that is in fp32, a CPU copies it to fp32 to add it (`add_gradient`), 4 bytes an element; a GPU casts as it
    adds, and makes no gradient that is added to a lent sum. Stage 2 copies gradients by buckets (`gradient_sums.py`).
    The head is not among them: its result and its gradient are in the loss. A head that is the embedding of the same
    stage leaves its gradient to autograd, until that of the embedding has come.
    """
    run, layers = stage.run, stage.layers[:-1] if stage.has_loss else stage.layers
    widest = max((layer.bytes.widest for layer in layers), default=0)
    making = stage.layers if run.layout.num_stages == 1 and stage.layers[-1].tied_key else layers
    is_added = run.config.sums_in_fp32 and run.hardware.device is Device.cuda
    made = (each.parameters.largest_made if is_added else each.parameters.largest_trained for each in making)
    return max(widest, count_new_gradient(stage, max(made, default=0)))


def count_new_gradient(stage: Stage | Chunk, num_elements: int) -> int:
    """Return the bytes of a gradient as autograd makes it, with a CPU's copy in fp32."""
    run = stage.run
    copies = run.weight_bytes < 4 and run.hardware.device is Device.cpu and not run.config.shards_gradients_only
    return (run.weight_bytes + (4 if copies else 0)) * num_elements
