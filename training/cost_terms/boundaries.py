"""Boundaries between stages: what crosses them, what a stage keeps of it, and the buffers it is received in."""

from __future__ import annotations

from training.cost_terms.cost_term import Chunk, CostTerm, Stage
from training.costs.memory import Kept, Memory
from training.costs.time import PassCost
from training.pipeline.schedule import UnitKind

SENDS = 2  # gradients on their way to another rank


def compute_kept(chunk: Chunk) -> Kept:
    """What a chunk got, and its output. Where its first layers are recomputed, their input is among what they keep."""
    got = 0 if chunk.checkpointing.list_groups(1)[0].is_recomputed else chunk.input_bytes
    output = 0 if chunk.has_loss else chunk.hidden_bytes
    return Kept(activations=got + chunk.integer_bytes + output)


def compute_buffers(stage: Stage) -> Memory:
    """What is on its way: received for the next pass, or for the one that runs, and gradients that are being sent."""
    hidden, integers = stage.chunks[0].hidden_bytes, stage.chunks[0].integer_bytes
    links = stage.schedule.list_links()
    gets = {kind for kind, _, stop in links if stop == stage.stage_id}
    sends = {kind for kind, start, _ in links if start == stage.stage_id}
    following = hidden + integers if UnitKind.forward in gets else hidden
    running = hidden if UnitKind.backward in gets else 0
    sent = SENDS * hidden if UnitKind.backward in sends else 0
    return Memory(buffers=following + running + sent if gets else 0)


def compute_transfer(chunk: Chunk) -> PassCost:
    """hidden_states and integers to the next chunk, the gradient of hidden_states back."""
    boundary = 2 * chunk.layers[-1].output_bytes + chunk.integer_bytes
    return PassCost(boundary_bytes=0 if chunk.has_loss else boundary)


BOUNDARIES = CostTerm(stage_memory=compute_buffers, chunk_memory=compute_kept, chunk_cost=compute_transfer)
