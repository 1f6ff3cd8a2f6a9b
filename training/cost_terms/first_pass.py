"""The forward pass before a step: of the model itself, or of a frozen one that is in memory next to it
(`PassOver.auxiliary`), with its weights and what it leaves for the step."""

from __future__ import annotations

from dataclasses import replace

from training.cost_terms import context_parallel, layer_ranks, layers, selection
from training.cost_terms.cost_term import Chunk, Memory, PassCost, Stage
from training.objectives.objective import PassOver
from training.objectives.registry import get_objective

_FORWARD = (  # the terms of a pass through layers
    *(layers.compute_passes, selection.compute_selection, context_parallel.compute_exchanges),
    *(layer_ranks.compute_sums, layer_ranks.compute_exchanges),
)


def compute_auxiliary(stage: Stage) -> Memory:
    """Return the bytes of the auxiliary model's stage: weights alone; while it runs, before the step, what a layer
    makes; and where the loss is, the hidden states at the targets of all micro-batches, every token a target."""
    if not stage.run.auxiliary:
        return Memory()
    own = stage.run.auxiliary[stage.stage_id]
    states = own.run.layout.gradient_accumulation_steps * own.chunks[-1].block_bytes if own.has_loss else 0
    weights = own.run.weight_bytes * own.num_parameters
    return Memory(weights=weights, activations=states, first_pass=states + count_working(own))


def count_working(stage: Stage) -> int:
    """Return the bytes that a forward pass without gradients takes in addition to weights: messages, and what the layer
    that takes most makes.

    At most that is all that training would keep of it. Of a plain one, what it holds where it is widest: the factors of
    an MLP's product, one of them before its activation function too, and the product, next to hidden states before and
    after the norm; eager attention makes all scores.
    """
    hidden = stage.chunks[-1].block_bytes
    made = (
        layer.bytes.saved
        if layer.is_estimated or stage.run.is_eager
        else min(layer.bytes.saved, 4 * layer.bytes.widest + 2 * hidden)
        for layer in stage.layers
    )
    return max(made) + 4 * hidden


def compute_first_pass(chunk: Chunk) -> PassCost:
    """Return the cost of a forward pass over as many tokens before the step: the model's own, for an objective that
    needs one; the auxiliary model's, which the first chunk of its stage counts."""
    run, passed = chunk.run, list[Chunk]()
    if run.auxiliary:
        own = run.auxiliary[chunk.stage_id].chunks
        passed = own if chunk.number == own[0].number else []
    elif get_objective(run.config).pass_over(run.config) not in (None, PassOver.auxiliary):
        passed = [chunk]
    forward = [replace(each, has_backward=False) for each in passed]
    return sum((compute(each) for each in forward for compute in _FORWARD), start=PassCost())
