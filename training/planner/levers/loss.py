"""The loss, which makes the logits: of the stage that has the last layer."""

from __future__ import annotations

from models.losses.logit_pieces import PIECE
from training.config.schema import Precision
from training.objectives.registry import get_objective
from training.planner.levers.lever import Chunk, Lever, Stage
from training.planner.memory import Memory
from training.planner.time import PassCost


def compute_loss(stage: Stage) -> Memory:
    """A rank's logits are those of its share of the vocabulary; scores of rows take next to nothing."""
    run = stage.run
    if get_objective(run.config).scores_rows:
        return Memory()
    shard = -(-run.vocab_size // run.layout.tensor_parallel_size)
    return Memory(loss=compute_loss_bytes(run.tokens * shard, run.config.precision) if stage.has_loss else 0)


def compute_loss_bytes(num_logits: int, precision: Precision) -> int:
    """Peak of `models.losses.cross_entropy` beside the head's gradient. num_logits: B x T x V, every token a target.

    In a piece: logits, in bf16 a copy in fp32, and their log-softmax. Of all: the logits' gradient in bf16. fp16 takes
    no pieces: its peak is in the backward pass, log-softmax, its gradient, and the logits' gradient, in fp32.
    """
    piece = min(num_logits, PIECE)
    return {Precision.fp32: 8 * piece, Precision.bf16: 10 * piece + 2 * num_logits, Precision.fp16: 12 * num_logits}[
        precision
    ]


def compute_second_logits(chunk: Chunk) -> PassCost:
    """An objective whose loss is not a sum over tokens makes its logits again in the backward pass."""
    makes_again = chunk.has_loss and get_objective(chunk.run.config).remakes_logits
    return chunk.run_again(chunk.layers[-1:]) if makes_again else PassCost()


def compute_first_pass(chunk: Chunk) -> PassCost:
    """A forward pass over as many tokens before the step, for an objective that needs one; it is counted with that of
    the step."""
    if not get_objective(chunk.run.config).needs_first_pass:
        return PassCost()
    return PassCost(
        forward_flops=sum(layer.forward_flops for layer in chunk.layers),
        forward_seconds=sum(chunk.time_forward(layer) for layer in chunk.layers),
    )


FIRST_PASS = Lever(chunk_cost=compute_first_pass)
LOSS = Lever(stage_memory=compute_loss, chunk_cost=compute_second_logits)
