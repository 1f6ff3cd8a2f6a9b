"""Boundaries between stages: the tensors that cross them, those that a stage keeps, and receive buffers."""

from __future__ import annotations

from training.cost_terms.cost_term import Chunk, CostTerm, Kept, Memory, PassCost, Stage
from training.pipeline.schedule import UnitKind

SENDS = 2  # gradients on their way to another rank


def compute_kept(chunk: Chunk) -> Kept:
    """Return the bytes of a chunk's input and output. A first group that is recomputed keeps the input itself."""
    got = 0 if chunk.checkpointing.list_groups(1)[0].is_recomputed else chunk.input_bytes
    output = 0 if chunk.has_loss else chunk.hidden_bytes
    return Kept(activations=got + chunk.integer_bytes + output)


def compute_buffers(stage: Stage) -> Memory:
    """Return the bytes in transfer: received for the next pass or the running one, and gradients that are being
    sent."""
    hidden, integers = stage.chunks[0].hidden_bytes, stage.chunks[0].integer_bytes
    links = stage.schedule.list_links()
    gets = {kind for kind, _, stop in links if stop == stage.stage_id}
    sends = {kind for kind, start, _ in links if start == stage.stage_id}
    following = hidden + integers if UnitKind.forward in gets else hidden
    running = hidden if UnitKind.backward in gets else 0
    sent = SENDS * hidden if UnitKind.backward in sends else 0
    return Memory(buffers=following + running + sent if gets else 0)


def compute_transfer(chunk: Chunk) -> PassCost:
    """Return the bytes between chunks: hidden_states and integers to the next, the gradient of hidden_states back."""
    boundary = 2 * chunk.layers[-1].bytes.output + chunk.integer_bytes
    return PassCost(boundary_bytes=0 if chunk.has_loss else boundary)


BOUNDARIES = CostTerm(stage_memory=compute_buffers, chunk_memory=compute_kept, chunk_cost=compute_transfer)
