"""Boundaries between stages: what crosses them, what a stage keeps of it, and the buffers it is received in."""

from __future__ import annotations

from training.distributed.p2p import SENDS_IN_FLIGHT
from training.pipeline.schedule import build_schedule
from training.planner.levers.lever import Chunk, Lever, Stage
from training.planner.memory import Kept, Memory
from training.planner.time import PassCost


def compute_kept(chunk: Chunk) -> Kept:
    """What a stage received beside the engine's clone of it, and its output (`_exec_forward_pass`)."""
    output = 0 if chunk.has_loss else chunk.hidden_bytes
    return Kept(activations=chunk.input_bytes + chunk.integer_bytes + output)


def compute_buffers(stage: Stage) -> Memory:
    """Receive buffers for activations and for gradients."""
    hidden, integers = stage.chunks[0].hidden_bytes, stage.chunks[0].integer_bytes
    if not build_schedule(stage.run.layout).runs_on_deepspeed:
        # a gradient that was received, what is received for the next pass, and gradients on their way
        return Memory(buffers=2 * hidden + integers + SENDS_IN_FLIGHT * hidden)
    return Memory(buffers=(0 if stage.is_first else hidden + integers) + (0 if stage.is_last else hidden))


def compute_transfer(chunk: Chunk) -> PassCost:
    """hidden_states and integers to the next chunk, the gradient of hidden_states back."""
    boundary = 2 * chunk.layers[-1].output_bytes + chunk.integer_bytes
    return PassCost(boundary_bytes=0 if chunk.has_loss else boundary)


BOUNDARIES = Lever(stage_memory=compute_buffers, chunk_memory=compute_kept, chunk_cost=compute_transfer)
