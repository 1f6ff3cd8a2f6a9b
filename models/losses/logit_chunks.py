"""Logits in chunks of a few targets: their log-probabilities, and their gradient in the same memory.

N targets of a micro-batch, n of a chunk, D hidden, V vocabulary. A chunk exists only while it is used, so there is
never an [N, V] in fp32, nor one in 16 bits where targets are many.

With tensor parallelism a rank has the logits of its own tokens only. Per target, the ranks of the group exchange the
largest logit, the sum of exponentials and the target's logit: three numbers, never the logits. `sharing` below
describes this group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn import functional as F
from transformers import PretrainedConfig

from models.losses.accumulate import add_product
from models.parallel.shard import TensorParallel, split_evenly, sum_over_ranks

# Logits of a chunk, small in memory and large enough for an efficient matrix product: 128 MiB in fp32. On a GPU 512
# MiB: with a vocabulary of 128k a product then has some 1,000 rows, which fill it, and launches are a quarter as many
CHUNK_LOGITS = 2**25
CHUNK_LOGITS_ON_GPU = 2**27
WAITING = 2**28  # logit gradients in 16 bits up to which one product is computed: 512 MiB
ROWS = 128  # the targets of a chunk are a multiple of this: tensor cores work in tiles of 128 rows


@dataclass(frozen=True)
class VocabularyShard:
    """The tokens from `start` to before `stop` of the vocabulary, which this rank's head holds. widest: the most tokens
    of any rank. size: tokens of the whole vocabulary. parallel: the ranks that share it.
    """

    start: int
    stop: int
    widest: int
    size: int
    parallel: TensorParallel

    def locate(self, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the indices of tokens in this shard, 0 for others, and whether they are in it; both in the shape of
        `token_ids`, which count in the whole vocabulary."""
        is_here = (token_ids >= self.start) & (token_ids < self.stop)
        return (token_ids - self.start) * is_here, is_here


def shard_vocabulary(config: PretrainedConfig, parallel: TensorParallel) -> VocabularyShard | None:
    """Return this rank's shard of the vocabulary of a model; None where it holds all of it. parallel: the ranks that
    share the model's head."""
    if parallel.size == 1:
        return None
    intervals = split_evenly(config.vocab_size, parallel.size)
    return VocabularyShard(*intervals[parallel.rank], widest=intervals[0][1], size=config.vocab_size, parallel=parallel)


def compute_log_probabilities(
    hidden: torch.Tensor, weight: torch.Tensor, logit_softcap: float | None, sharing: VocabularyShard | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the log-probabilities of the weight's tokens, [n, V], fp32 at least, and tanh(logits / cap), [n, V], of
    capped logits, None of others. hidden: [n, D]. weight: [V, D]. logit_softcap: the cap; None without one."""
    logits, tanh_logits = F.linear(hidden, weight), None  # [n, V]
    if logit_softcap is not None:
        tanh_logits = torch.tanh(logits / logit_softcap)
        logits = logit_softcap * tanh_logits
    dtype = torch.promote_types(weight.dtype, torch.float32)
    if sharing is None:
        return F.log_softmax(logits, dim=-1, dtype=dtype), tanh_logits
    logits = logits.to(dtype)
    largest = logits.amax(dim=-1, keepdim=True)  # [n, 1]
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=sharing.parallel.group)
    exponentials = sum_over_ranks((logits - largest).exp_().sum(dim=-1, keepdim=True), sharing.parallel)
    return logits.sub_(largest + exponentials.log_()), tanh_logits


def choose_targets(
    log_probabilities: torch.Tensor, target_ids: torch.Tensor, sharing: VocabularyShard | None
) -> torch.Tensor:
    """Return the log-probabilities of the targets, [n]. log_probabilities: [n, V]. target_ids: int64 [n], in the whole
    vocabulary."""
    if sharing is None:
        return log_probabilities.gather(1, target_ids.unsqueeze(1)).squeeze(1)
    index, is_here = sharing.locate(target_ids)
    return sum_over_ranks(
        log_probabilities.gather(1, index.unsqueeze(1)).squeeze(1).masked_fill(~is_here, 0), sharing.parallel
    )


def average_vocabulary(log_probabilities: torch.Tensor, sharing: VocabularyShard | None) -> torch.Tensor:
    """Return the mean of each row of log-probabilities [n, V] over the whole vocabulary, [n]."""
    if sharing is None:
        return log_probabilities.mean(dim=-1)
    return sum_over_ranks(log_probabilities.sum(dim=-1), sharing.parallel) / sharing.size


def predict(log_probabilities: torch.Tensor, sharing: VocabularyShard | None) -> torch.Tensor:
    """Return the most probable token of each row of log-probabilities [n, V], of equal ones the first, int64 [n], as
    the whole vocabulary counts it."""
    highest, token_ids = log_probabilities.max(dim=-1)
    if sharing is None:
        return token_ids
    largest = highest.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=sharing.parallel.group)
    token_ids = torch.where(highest == largest, token_ids + sharing.start, sharing.size)
    dist.all_reduce(token_ids, op=dist.ReduceOp.MIN, group=sharing.parallel.group)
    return token_ids


def differentiate(
    log_probabilities: torch.Tensor,
    target_ids: torch.Tensor,
    sharing: VocabularyShard | None,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Return the gradient of the targets' cross entropies by the capped logits, [n, V]; overwrites
    `log_probabilities`."""
    probabilities = log_probabilities.exp_()
    if sharing is None:
        index, less = target_ids, probabilities.new_full((), label_smoothing - 1).expand_as(target_ids)
    else:
        index, is_here = sharing.locate(target_ids)
        less = (label_smoothing - 1) * is_here.to(probabilities.dtype)
    if label_smoothing:
        probabilities.sub_(label_smoothing / (probabilities.shape[-1] if sharing is None else sharing.size))
    return probabilities.scatter_add_(1, index.unsqueeze(1), less.unsqueeze(1))


def differentiate_cap(grad_logits: torch.Tensor, tanh_logits: torch.Tensor | None) -> torch.Tensor:
    """Return the gradient by the logits before they were capped, in place. tanh_logits: None where they were not."""
    return grad_logits if tanh_logits is None else grad_logits.mul_(1 - tanh_logits.to(grad_logits.dtype).square())


def is_on_gpu(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is on a device whose chunks are those of a GPU: any but a CPU."""
    return tensor.device.type != "cpu"


def count_chunk_logits(on_gpu: bool) -> int:
    """Return the most logits of a chunk, if its targets are more than `ROWS`."""
    return CHUNK_LOGITS_ON_GPU if on_gpu else CHUNK_LOGITS


def list_chunks(hidden: torch.Tensor, weight: torch.Tensor, sharing: VocabularyShard | None) -> list[slice]:
    """Return the chunks of targets, the same on all ranks that share the vocabulary, whatever their shards. hidden: the
    states at all targets, [N, D]. weight: this rank's, [V, D]."""
    rows = count_chunk_rows(weight.shape[0] if sharing is None else sharing.widest, is_on_gpu(hidden))
    return [slice(start, start + rows) for start in range(0, len(hidden), rows)]


def count_chunk_rows(vocabulary: int, on_gpu: bool) -> int:
    """Return the number of targets of a chunk, a multiple of `ROWS`. vocabulary: the tokens that a rank has logits
    of."""
    return max(1, count_chunk_logits(on_gpu) // (vocabulary * ROWS)) * ROWS


def count_waiting(num_targets: int, hidden_size: int, vocabulary: int, on_gpu: bool) -> int:
    """Return how many targets' logit gradients are kept in 16 bits for one product: all N, or a few chunks where a sum
    [V, D] in fp32 takes less memory and the product of a few chunks is still one of large matrices.
    """
    rows = count_chunk_rows(vocabulary, on_gpu)
    few = max(1, hidden_size // (4 * rows)) * rows
    return few if num_targets * vocabulary > WAITING and num_targets > few + 2 * hidden_size else num_targets


class LogitGradients:
    """The gradients of hidden states and weight, accumulated from chunks of the logits' gradient.

    The gradient of a weight in fp32 is added up chunk by chunk. In 16 bits each sum would be rounded, so the chunks are
    kept for one product, as in the plain loss; for many targets it is several products, summed in fp32
    (`count_waiting`). A frozen weight has no gradient. That of the hidden states is summed over the ranks that share
    the vocabulary, here or where parts of sequences were gathered.
    """

    def __init__(
        self, hidden: torch.Tensor, weight: torch.Tensor, weight_trains: bool, sharing: VocabularyShard | None
    ) -> None:
        self._hidden, self._weight, self._sharing = hidden, weight, sharing
        self._grad_hidden = torch.empty_like(hidden)
        self._grad_weight: torch.Tensor | None = None
        self._grad_logits: torch.Tensor | None = None  # those of the last targets, [W, V]
        self._first = self._stop = 0  # the targets in it
        if weight_trains and weight.dtype in (torch.bfloat16, torch.float16):
            waiting = count_waiting(len(hidden), hidden.shape[1], len(weight), is_on_gpu(hidden))
            self._grad_logits = weight.new_empty(waiting, len(weight))
            if waiting < len(hidden):
                self._grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        elif weight_trains:
            self._grad_weight = torch.zeros_like(weight)

    def add(self, chunk: slice, grad_logits: torch.Tensor) -> None:
        """Add the gradient of a chunk. grad_logits: [n, V], fp32 at least. Chunks are added in order."""
        if self._grad_logits is not None:
            if self._stop + len(grad_logits) - self._first > len(self._grad_logits):
                self._sum_waiting()
            start = self._stop - self._first
            self._stop += len(grad_logits)
            grad_logits = self._grad_logits[start : start + len(grad_logits)].copy_(grad_logits)
        else:
            grad_logits = grad_logits.to(self._weight.dtype)
        torch.mm(grad_logits, self._weight, out=self._grad_hidden[chunk])
        if self._grad_weight is not None and self._grad_logits is None:
            self._grad_weight.addmm_(grad_logits.T, self._hidden[chunk])

    def _sum_waiting(self) -> None:
        """Add the products of the kept gradients, for a few tokens of the vocabulary at a time to save memory."""
        assert self._grad_logits is not None and self._grad_weight is not None
        hidden = self._hidden[self._first : self._stop]
        tokens = max(1, count_chunk_logits(is_on_gpu(hidden)) // hidden.shape[1])
        for grad_logits, total in zip(
            self._grad_logits[: len(hidden)].split(tokens, dim=1), self._grad_weight.split(tokens), strict=True
        ):
            add_product(total, grad_logits.T, hidden)
        self._first = self._stop

    def finish(self, factor: torch.Tensor | float = 1.0) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the gradients of hidden states and weight, times `factor`."""
        if self._grad_logits is not None:
            if self._grad_weight is None:
                self._grad_weight = self._grad_logits.T @ self._hidden
            else:
                self._sum_waiting()
            self._grad_logits = None
        if self._sharing is not None and not self._sharing.parallel.splits_sequence:
            self._grad_hidden = sum_over_ranks(self._grad_hidden, self._sharing.parallel)
        grad_weight = None if self._grad_weight is None else self._grad_weight.mul_(factor).to(self._weight.dtype)
        return self._grad_hidden.mul_(factor), grad_weight
