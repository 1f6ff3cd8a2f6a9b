"""Logits a few targets at a time: their log-probabilities, and their gradient in place of them.

N targets of a micro-batch, n of a piece, D hidden, V vocabulary. A piece is there only while it is used, so that no
[N, V] in fp32 ever is, nor one in 16 bits where targets are many.

With tensor parallelism a rank has the logits of its own tokens only. The ranks of the group exchange the largest logit
and the sum of the exponentials of each target, and its own logit: three numbers a target, never the logits. `sharing`
below is such a group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn import functional as F
from transformers import PretrainedConfig

from models.parallel.shard import TensorParallel, split_evenly, sum_over_ranks

PIECE = 2**25  # logits in one piece: 128 MiB in fp32, few enough to be small, many enough to keep a matrix product busy
WAITING = 2**28  # gradients of logits in 16 bits that wait for one product, at least: 512 MiB
ROWS = 128  # a piece has a multiple of so many targets: a matrix product on tensor cores works in tiles of 128 rows


@dataclass(frozen=True)
class VocabularyShard:
    """The tokens `start` to `stop` of the vocabulary, which this rank's head has; `widest`: the most of any rank;
    `size`: of the whole.
    """

    start: int
    stop: int
    widest: int
    size: int
    parallel: TensorParallel

    def locate(self, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Where tokens are in this share, 0 for others; and whether they are in it."""
        is_here = (token_ids >= self.start) & (token_ids < self.stop)
        return (token_ids - self.start) * is_here, is_here


def shard_vocabulary(config: PretrainedConfig, parallel: TensorParallel) -> VocabularyShard | None:
    """None where a rank has all of it."""
    if parallel.size == 1:
        return None
    intervals = split_evenly(config.vocab_size, parallel.size)
    return VocabularyShard(*intervals[parallel.rank], widest=intervals[0][1], size=config.vocab_size, parallel=parallel)


def compute_log_probabilities(
    hidden: torch.Tensor, weight: torch.Tensor, logit_softcap: float | None, sharing: VocabularyShard | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Of all tokens that the weight has, [n, V], fp32 at least; and the tanh of the logits where they are capped."""
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
    """The log-probabilities of the targets, [n]."""
    if sharing is None:
        return log_probabilities.gather(1, target_ids.unsqueeze(1)).squeeze(1)
    place, is_here = sharing.locate(target_ids)
    return sum_over_ranks(
        log_probabilities.gather(1, place.unsqueeze(1)).squeeze(1).masked_fill(~is_here, 0), sharing.parallel
    )


def average_vocabulary(log_probabilities: torch.Tensor, sharing: VocabularyShard | None) -> torch.Tensor:
    """The mean of each row over the whole vocabulary, [n]."""
    if sharing is None:
        return log_probabilities.mean(dim=-1)
    return sum_over_ranks(log_probabilities.sum(dim=-1), sharing.parallel) / sharing.size


def predict(log_probabilities: torch.Tensor, sharing: VocabularyShard | None) -> torch.Tensor:
    """The most probable token of each row, of equal ones the first, int64 [n]."""
    highest, token_ids = log_probabilities.max(dim=-1)
    if sharing is None:
        return token_ids
    of_all = highest.clone()
    dist.all_reduce(of_all, op=dist.ReduceOp.MAX, group=sharing.parallel.group)
    token_ids = torch.where(highest == of_all, token_ids + sharing.start, sharing.size)
    dist.all_reduce(token_ids, op=dist.ReduceOp.MIN, group=sharing.parallel.group)
    return token_ids


def differentiate(
    log_probabilities: torch.Tensor,
    tanh_logits: torch.Tensor | None,
    target_ids: torch.Tensor,
    sharing: VocabularyShard | None,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """The gradient of the targets' cross entropies by the logits, [n, V], in place of `log_probabilities`."""
    probabilities = log_probabilities.exp_()
    if sharing is None:
        place, less = target_ids, probabilities.new_full((), label_smoothing - 1).expand_as(target_ids)
    else:
        place, is_here = sharing.locate(target_ids)
        less = (label_smoothing - 1) * is_here.to(probabilities.dtype)
    if label_smoothing:
        probabilities.sub_(label_smoothing / (probabilities.shape[-1] if sharing is None else sharing.size))
    of_logits = probabilities.scatter_add_(1, place.unsqueeze(1), less.unsqueeze(1))
    if tanh_logits is not None:
        of_logits.mul_(1 - tanh_logits.to(of_logits.dtype).square())
    return of_logits


def list_pieces(hidden: torch.Tensor, weight: torch.Tensor, sharing: VocabularyShard | None) -> list[slice]:
    """The same on all ranks that share the vocabulary, whatever each has of it."""
    rows = count_rows(weight.shape[0] if sharing is None else sharing.widest)
    return [slice(start, start + rows) for start in range(0, len(hidden), rows)]


def count_rows(vocabulary: int) -> int:
    """Targets of a piece."""
    return max(1, PIECE // (vocabulary * ROWS)) * ROWS


def count_waiting(num_targets: int, hidden_size: int, vocabulary: int) -> int:
    """Targets whose logits' gradient waits in 16 bits, all of N or a few pieces: where a sum [V, D] in fp32 takes less
    memory than all, and a product of so few is still one of large matrices.
    """
    rows = count_rows(vocabulary)
    few = max(1, hidden_size // (4 * rows)) * rows
    return few if num_targets * vocabulary > WAITING and num_targets > few + 2 * hidden_size else num_targets


class LogitGradients:
    """The gradients of hidden states and weight, put together from pieces of the logits' gradient.

    A weight in fp32 adds up its gradient piece by piece. In 16 bits each sum would be rounded, so the pieces wait, and
    one product makes it, as in the plain loss; of many targets several products do, whose sum is in fp32
    (`count_waiting`). A frozen weight has none. What the hidden states get is summed over the ranks that share the
    vocabulary, here or where parts of sequences were gathered.
    """

    def __init__(
        self, hidden: torch.Tensor, weight: torch.Tensor, weight_trains: bool, sharing: VocabularyShard | None
    ) -> None:
        self._hidden, self._weight, self._sharing = hidden, weight, sharing
        self._of_hidden = torch.empty_like(hidden)
        self._of_weight: torch.Tensor | None = None
        self._of_logits: torch.Tensor | None = None  # of the last targets, [W, V]
        self._first = self._stop = 0  # of those that wait there
        if weight_trains and weight.dtype in (torch.bfloat16, torch.float16):
            waiting = count_waiting(len(hidden), hidden.shape[1], len(weight))
            self._of_logits = weight.new_empty(waiting, len(weight))
            if waiting < len(hidden):
                self._of_weight = torch.zeros_like(weight, dtype=torch.float32)
        elif weight_trains:
            self._of_weight = torch.zeros_like(weight)

    def add(self, piece: slice, of_logits: torch.Tensor) -> None:
        """of_logits: [n, V], fp32 at least. Pieces come in their order."""
        if self._of_logits is not None:
            if self._stop + len(of_logits) - self._first > len(self._of_logits):
                self._sum_waiting()
            place = self._stop - self._first
            self._stop += len(of_logits)
            of_logits = self._of_logits[place : place + len(of_logits)].copy_(of_logits)
        else:
            of_logits = of_logits.to(self._weight.dtype)
        torch.mm(of_logits, self._weight, out=self._of_hidden[piece])
        if self._of_weight is not None and self._of_logits is None:
            self._of_weight.addmm_(of_logits.T, self._hidden[piece])

    def _sum_waiting(self) -> None:
        """Products of a few tokens of the vocabulary at a time: none is as large as the weight."""
        assert self._of_logits is not None and self._of_weight is not None
        hidden = self._hidden[self._first : self._stop]
        tokens = max(1, PIECE // hidden.shape[1])
        for of_logits, total in zip(
            self._of_logits[: len(hidden)].split(tokens, dim=1), self._of_weight.split(tokens), strict=True
        ):
            total.add_(of_logits.T @ hidden)
        self._first = self._stop

    def finish(self, factor: torch.Tensor | float = 1.0) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Both gradients, times `factor`."""
        if self._of_logits is not None:
            if self._of_weight is None:
                self._of_weight = self._of_logits.T @ self._hidden
            else:
                self._sum_waiting()
            self._of_logits = None
        if self._sharing is not None and not self._sharing.parallel.splits_sequence:
            self._of_hidden = sum_over_ranks(self._of_hidden, self._sharing.parallel)
        grad_weight = None if self._of_weight is None else self._of_weight.mul_(factor).to(self._weight.dtype)
        return self._of_hidden.mul_(factor), grad_weight
