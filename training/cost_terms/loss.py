"""The loss, which makes the logits: of the stage that has the last layer."""

from __future__ import annotations

from models.losses.logit_chunks import count_chunk_logits, count_chunk_rows, count_waiting
from models.losses.options import Divergence
from training.config.schema import Device, DistillConfig, Precision
from training.cost_terms.cost_term import Chunk, CostTerm, Stage
from training.cost_terms.layers import count_new_gradient, count_on_the_way
from training.costs.memory import Memory
from training.costs.time import PassCost
from training.objectives.objective import PassOver
from training.objectives.registry import get_objective

# Bytes read and written of a logit: made in bf16, its log-softmax in fp32 with two looks at it, its exponential in
# place, and that cast to bf16 (`models/losses/logit_chunks.py`)
LOGIT_BYTES = 2 + (2 + 2 + 4) + (4 + 4) + (4 + 2)


def compute_loss(stage: Stage) -> Memory:
    """Return the bytes of the loss on the last stage; scores of documents take next to nothing, vectors of a whole
    batch what its objective says.

    A rank's logits are those of its share of the vocabulary. Included are the gradients of the head and of its input,
    as far as they exceed those that `layers.py` counts for the other layers.
    """
    run = stage.run
    if not stage.has_loss:
        return Memory()
    objective = get_objective(run.config)
    if objective.head is not None:
        hidden_size = stage.chunks[-1].block_bytes // (run.tokens * run.weight_bytes)
        return Memory(loss=objective.count_batch_bytes(run.config, run.layout.global_batch_size, hidden_size))
    shard = -(-run.vocab_size // run.layout.tensor_parallel_size)
    hidden = stage.chunks[-1].block_bytes
    trained = stage.layers[-1].parameters.largest_trained
    head = count_new_gradient(stage, trained)
    hidden_size = hidden // (run.tokens * run.weight_bytes)
    on_gpu = run.hardware.device is not Device.cpu
    counted = (run.tokens, shard, hidden_size, run.config.precision, on_gpu)
    taken = compute_loss_bytes(*counted, weight_trains=trained > 0) + hidden + head
    taken += compute_distill_bytes(run.tokens, shard, run.config.distill, run.config.precision, on_gpu)
    kept = compute_kept_bytes(*counted, weight_trains=trained > 0) + hidden
    further = (stage.layers[-1].num_blocks - 1) * kept  # of each depth, until the backward pass
    return Memory(loss=max(0, taken + further - 2 * hidden - count_on_the_way(stage)))


def compute_loss_bytes(
    num_targets: int,
    vocabulary: int,
    hidden_size: int,
    precision: Precision,
    on_gpu: bool,
    *,
    weight_trains: bool = True,
) -> int:
    """Return the peak bytes of `models.losses.cross_entropy` without the head's gradient. num_targets: B x T, every
    token a target.

    In a chunk, of whole tiles of targets: logits, in bf16 a copy in fp32, and their log-softmax. For all, or for those
    that wait for a product with the head: the logits' gradient in bf16; in addition the sum of the head's in fp32, and
    a part of it in bf16. None of these where the head is frozen. fp16 takes no chunks: its peak is in the backward
    pass, log-softmax, its gradient, and the logits' gradient, in fp32.
    """
    num_logits = num_targets * vocabulary
    chunk_logits = min(num_targets, count_chunk_rows(vocabulary, on_gpu)) * vocabulary
    if precision is not Precision.bf16:
        return {Precision.fp32: 8 * chunk_logits, Precision.fp16: 12 * num_logits}[precision]
    if not weight_trains:
        return 10 * chunk_logits
    waiting = count_waiting(num_targets, hidden_size, vocabulary, on_gpu)
    summed = 4 * hidden_size * vocabulary + 2 * count_chunk_logits(on_gpu) if waiting < num_targets else 0
    return 10 * chunk_logits + 2 * waiting * vocabulary + summed


def compute_kept_bytes(
    num_targets: int,
    vocabulary: int,
    hidden_size: int,
    precision: Precision,
    on_gpu: bool,
    *,
    weight_trains: bool = True,
) -> int:
    """Return the bytes of what a loss, as in `compute_loss_bytes`, keeps until its backward pass: logit gradients in
    bf16, and the sum of the head's gradient in fp32, both unless the head is frozen."""
    head = 4 * hidden_size * vocabulary * weight_trains
    if precision is Precision.bf16:
        if not weight_trains:
            return 0
        waiting = count_waiting(num_targets, hidden_size, vocabulary, on_gpu)
        return 2 * waiting * vocabulary + (head if waiting < num_targets else 0)
    return {Precision.fp32: head, Precision.fp16: 8 * num_targets * vocabulary}[precision]


def compute_distill_bytes(
    num_targets: int, vocabulary: int, distill: DistillConfig, precision: Precision, on_gpu: bool
) -> int:
    """Return the bytes that a teacher adds to those of `compute_loss_bytes`: its distributions, where they are read,
    and the bytes of a chunk by which it exceeds what its log-softmax takes.

    In a chunk, in fp32 next to the log-probabilities: of the teacher's most probable tokens, the student's
    probabilities, at another temperature their sum's terms too; with a teacher in memory before that its own
    log-probabilities and probabilities, and those terms. Over the whole vocabulary both at the temperature, the
    divergence's terms and their gradient, and for jensen_shannon the mean and its terms.
    """
    if distill.teacher is None:
        return 0
    chunk_logits = min(num_targets * vocabulary, count_chunk_logits(on_gpu))
    in_chunk = (8 if distill.temperature == 1 else 12) + 4 * distill.online
    if distill.top_k is None:
        in_chunk = 28 if distill.divergence is Divergence.jensen_shannon else 20
    more = max(0, in_chunk - {Precision.bf16: 10}.get(precision, 8)) * chunk_logits
    if distill.online or distill.top_k is None:
        return more
    return more + num_targets * (4 * distill.top_k + 4 * (distill.top_k + 1))


def compute_second_logits(chunk: Chunk) -> PassCost:
    """Return the time to make logits again in the backward pass, for an objective whose loss is not a sum over
    tokens."""
    makes_again = chunk.has_loss and get_objective(chunk.run.config).remakes_logits
    return chunk.run_again(chunk.layers[-1:]) if makes_again else PassCost()


def compute_logits(chunk: Chunk) -> PassCost:
    """Return the time of what the loss does with its logits besides the products, in the forward pass, where they are
    made and turned into their gradient; all of it is bound by memory. In layers that were timed it is included."""
    run = chunk.run
    if not chunk.has_loss or chunk.layers[-1].work.pass_seconds or run.hardware.device is not Device.cuda:
        return PassCost()
    if get_objective(run.config).head is not None:
        return PassCost()
    num_targets = run.tokens * chunk.layers[-1].num_blocks
    moved = LOGIT_BYTES * num_targets * -(-run.vocab_size // run.layout.tensor_parallel_size)
    return PassCost(forward_seconds=moved / run.hardware.stream_rate)


def compute_early_products(chunk: Chunk) -> PassCost:
    """Return the seconds of the head's backward pass, moved into the forward pass: a loss that is a sum over tokens
    turns a chunk of logits into their gradient, and multiplies it, while it has them
    (`models/losses/cross_entropy.py`). In layers that were timed they are there."""
    config = chunk.run.config
    objective = get_objective(config)
    waits = objective.head is not None or objective.remakes_logits or config.precision is Precision.fp16
    if not chunk.has_loss or waits or config.evaluate_only or chunk.layers[-1].work.pass_seconds:
        return PassCost()
    seconds = chunk.time_backward(chunk.layers[-1])
    return PassCost(forward_seconds=seconds, backward_seconds=-seconds)


def compute_loss_cost(chunk: Chunk) -> PassCost:
    """Return the time of the loss in addition to the head's products."""
    return compute_second_logits(chunk) + compute_logits(chunk) + compute_early_products(chunk)


def compute_first_pass(chunk: Chunk) -> PassCost:
    """Return the time of the model's own forward pass over as many tokens before the step, for an objective that needs
    one."""
    if get_objective(chunk.run.config).pass_over(chunk.run.config) in (None, PassOver.as_teacher):
        return PassCost()
    return PassCost(
        forward_flops=sum(layer.work.forward_flops for layer in chunk.layers),
        forward_seconds=sum(chunk.time_forward(layer) for layer in chunk.layers),
    )


FIRST_PASS = CostTerm(chunk_cost=compute_first_pass)
LOSS = CostTerm(stage_memory=compute_loss, chunk_cost=compute_loss_cost)
