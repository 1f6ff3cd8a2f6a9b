"""A teacher that is in memory next to its student (`distill.online`): its weights, what it leaves of a step, and its
forward passes."""

from __future__ import annotations

from training.config.schema import AttnImplementation
from training.cost_terms.cost_term import Chunk, CostTerm, Stage
from training.costs.cost import LayerCost
from training.costs.memory import Memory
from training.costs.time import PassCost


def compute_teacher(stage: Stage) -> Memory:
    """Return the bytes of the teacher's stage: weights alone; while it runs, before the step, what a layer makes; and
    where the loss is, the hidden states at the targets of all micro-batches, every token a target."""
    if not stage.run.teacher:
        return Memory()
    own = stage.run.teacher[stage.stage_id]
    states = own.run.layout.gradient_accumulation_steps * own.chunks[-1].block_bytes if own.has_loss else 0
    weights = own.run.weight_bytes * own.num_parameters
    return Memory(weights=weights, activations=states, first_pass=states + count_working(own))


def count_working(stage: Stage) -> int:
    """Return the bytes that a forward pass without gradients takes in addition to weights: messages, and what the layer
    that takes most makes."""
    return max(_count_held(stage, layer) for layer in stage.layers) + 4 * stage.chunks[-1].block_bytes


def _count_held(stage: Stage, layer: LayerCost) -> int:
    """All that training would keep of a layer, at most. Of a plain one, what it holds where it is widest: the factors
    of an MLP's product, one of them before its activation function too, and the product, next to hidden states before
    and after the norm."""
    is_eager = stage.run.config.attn_implementation is AttnImplementation.eager  # which makes all scores
    if layer.is_estimated or is_eager:
        return layer.bytes.saved
    return min(layer.bytes.saved, 4 * layer.bytes.widest + 2 * stage.chunks[-1].block_bytes)


def compute_teacher_pass(chunk: Chunk) -> PassCost:
    """Return the cost of the teacher's forward pass over a micro-batch, which the first chunk of its stage counts."""
    run = chunk.run
    if not run.teacher or chunk.number != run.teacher[chunk.stage_id].chunks[0].number:
        return PassCost()
    chunks = run.teacher[chunk.stage_id].chunks
    return PassCost(
        forward_flops=sum(layer.work.forward_flops for each in chunks for layer in each.layers),
        forward_seconds=sum(each.time_forward(layer) for each in chunks for layer in each.layers),
    )


TEACHER = CostTerm(stage_memory=compute_teacher, chunk_cost=compute_teacher_pass)
