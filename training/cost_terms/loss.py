"""The loss, which makes the logits: of the stage that has the last layer."""

from __future__ import annotations

from dataclasses import dataclass

from models.losses.logit_chunks import count_chunk_logits, count_chunk_rows, count_waiting
from training.config.schema import Device, Precision
from training.cost_terms.activations import run_again
from training.cost_terms.buffers import count_new_gradient, count_on_the_way
from training.cost_terms.cost_term import Chunk, Memory, PassCost, Stage
from training.cost_terms.layers import time_pass
from training.objectives.registry import get_objective

# Bytes read and written of a logit: made in bf16, its log-softmax in fp32 with two looks at it, its exponential in
# place, and that cast to bf16 (`models/losses/logit_chunks.py`)
LOGIT_BYTES = 2 + (2 + 2 + 4) + (4 + 4) + (4 + 2)


@dataclass(frozen=True)
class LossBytes:
    """The bytes of `models.losses.cross_entropy` for a micro-batch, without the gradient of the head."""

    num_targets: int  # B x T, every token a target
    vocabulary: int  # tokens of the rank's share
    hidden_size: int
    precision: Precision
    on_gpu: bool
    weight_trains: bool = True  # whether the head is trained

    @property
    def peak(self) -> int:
        """The most bytes at once.

        In a chunk, of whole tiles of targets: logits, in bf16 a copy in fp32, and their log-softmax; a part of the sum
        of the head's gradient in bf16; and what is kept. fp16 takes no chunks: its peak is in the backward pass,
        log-softmax, its gradient, and the logits' gradient, in fp32.
        """
        if self.precision is Precision.fp16:
            return 12 * self.num_targets * self.vocabulary
        chunk_logits = min(self.num_targets, count_chunk_rows(self.vocabulary, self.on_gpu)) * self.vocabulary
        if self.precision is Precision.fp32:
            return 8 * chunk_logits
        part = 2 * count_chunk_logits(self.on_gpu) if self.weight_trains and self._num_waiting < self.num_targets else 0
        return 10 * chunk_logits + part + self.kept

    @property
    def kept(self) -> int:
        """The bytes that stay until the backward pass: the logits' gradient, in bf16 of all targets or those that wait
        for a product with the head; in addition to the latter the sum of the head's in fp32. None of these where the
        head is frozen."""
        if self.precision is Precision.fp16:
            return 8 * self.num_targets * self.vocabulary
        head = 4 * self.hidden_size * self.vocabulary * self.weight_trains
        if self.precision is Precision.fp32:
            return head
        waiting = self._num_waiting * self.weight_trains
        return 2 * waiting * self.vocabulary + (head if waiting < self.num_targets else 0)

    @property
    def _num_waiting(self) -> int:
        return count_waiting(self.num_targets, self.hidden_size, self.vocabulary, self.on_gpu)


def compute_loss(stage: Stage) -> Memory:
    """Return the bytes of the loss on the last stage; scores of documents take next to nothing, vectors of a whole
    batch what its objective says.

    A rank's logits are those of its share of the vocabulary. Included are the gradients of the head and of its input,
    as far as they exceed those that `buffers.py` counts for the other layers.
    """
    run = stage.run
    if not stage.has_loss:
        return Memory()
    objective, hidden = get_objective(run.config), stage.chunks[-1].block_bytes
    hidden_size = hidden // (run.tokens * run.weight_bytes)
    if objective.head is not None:
        return Memory(loss=objective.count_batch_bytes(run.config, run.layout.global_batch_size, hidden_size))
    shard, trained = -(-run.vocab_size // run.layout.tensor_parallel_size), stage.layers[-1].parameters.largest_trained
    on_gpu = run.hardware.device is not Device.cpu
    found = LossBytes(run.tokens, shard, hidden_size, run.config.precision, on_gpu, trained > 0)
    more = sum(
        each.count_loss_bytes(run.config, run.tokens, shard, on_gpu) for each in objective.list_active(run.config)
    )
    taken = found.peak + more + hidden + count_new_gradient(stage, trained)
    further = (stage.layers[-1].num_blocks - 1) * (found.kept + hidden)  # of each depth, until the backward pass
    return Memory(loss=max(0, taken + further - 2 * hidden - count_on_the_way(stage)))


def compute_loss_cost(chunk: Chunk) -> PassCost:
    """Return the time of the loss in addition to the head's products.

    An objective whose loss is not a sum over tokens makes its logits again in the backward pass. One whose loss is
    multiplies the gradient of a chunk of logits while it has them (`models/losses/cross_entropy.py`): the head's
    backward pass is a part of the forward pass. What it does with its logits besides, there too, is bound by memory.
    In layers that were timed both are included.
    """
    run, head = chunk.run, chunk.layers[-1]
    objective, config = get_objective(run.config), run.config
    if not chunk.has_loss:
        return PassCost()
    cost = run_again([head], run) if objective.remakes_logits else PassCost()
    if head.work.pass_seconds or objective.head is not None:
        return cost
    if run.hardware.device is Device.cuda:
        num_logits = run.tokens * head.num_blocks * -(-run.vocab_size // run.layout.tensor_parallel_size)
        cost += PassCost(forward_seconds=LOGIT_BYTES * num_logits / run.hardware.stream_rate)
    if not (objective.remakes_logits or config.precision is Precision.fp16 or config.evaluate_only):
        early = time_pass(head, run, is_backward=True)
        cost += PassCost(forward_seconds=early, backward_seconds=-early)
    return cost
