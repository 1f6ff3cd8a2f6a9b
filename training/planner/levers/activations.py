"""Activations, and activation checkpointing, which keeps fewer of them and runs layers again."""

from __future__ import annotations

from training.planner.levers.lever import Chunk, Lever
from training.planner.memory import Kept
from training.planner.time import PassCost


def compute_kept(chunk: Chunk) -> Kept:
    """Group by group as the backward pass goes: what later groups kept is freed by then."""
    checkpointing = chunk.checkpointing
    kept = recomputation = 0
    for group in reversed(checkpointing.list_groups(len(chunk.layers))):
        layers = chunk.layers[group.start : group.stop]
        if not group.is_recomputed:
            kept += sum(layer.saved_bytes for layer in layers)
            continue
        remade = sum(layer.remade_bytes if checkpointing.is_selective else layer.saved_bytes for layer in layers)
        recomputation = max(recomputation, remade - kept)
        kept += chunk.layers[group.start - 1].output_bytes if group.start else chunk.input_bytes
        if checkpointing.is_selective:
            kept += sum(layer.kept_bytes for layer in layers)
    return Kept(
        activations=kept, recomputation=recomputation, deferred=sum(layer.deferred_bytes for layer in chunk.layers)
    )


def compute_recomputation(chunk: Chunk) -> PassCost:
    """`selective` keeps what costs time."""
    return PassCost() if chunk.checkpointing.is_selective else chunk.run_again(chunk.list_recomputed())


ACTIVATIONS = Lever(chunk_memory=compute_kept, chunk_cost=compute_recomputation)
