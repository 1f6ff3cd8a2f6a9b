"""Distillation (1503.02531): the divergence of a student's next-token distribution from its teacher's.

At one target, with logits z and temperature T, let p = softmax(z / T) be the student's distribution and q the
teacher's at the same T, over V tokens. Where of q only its k most probable tokens are known, all other tokens are one
event, with the rest of the mass: q_1, ..., q_k, q_rest = 1 - sum of q_i. The student's p_1, ..., p_k, p_rest are those
of the teacher's tokens. Both are distributions over k + 1 events, or over all V tokens, so each of these is a
divergence: at least 0, and 0 for equal ones.

    forward          KL(q || p) = sum_j q_j (log q_j - log p_j)
                     Covers everything that the teacher might say.
    reverse          KL(p || q) = sum_j p_j (log p_j - log q_j)
                     2306.08543: keeps to what the teacher says most.
    jensen_shannon   (KL(p || m) + KL(q || m)) / 2,  m = (p + q) / 2
                     Symmetric, at most log 2.

Joining events never increases such a divergence, so each is a lower bound of the one over the whole vocabulary; with
k = V it is that one. The distillation loss is T^2 times it, since its gradient by z shrinks with 1 / T^2 (section 2.1).

With g_j = dD / dp_j, of the event j that a token i belongs to, dD / d(z_i / T) = p_i (g_j - sum_j p_j g_j).

n targets of a chunk, V tokens of this rank's shard of the vocabulary, k of the teacher's tokens. `sharing`: see
`models/losses/logit_chunks.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from extensions.distillation.keys import Divergence
from models.losses.cross_entropy import TargetChunk
from models.losses.logit_chunks import VocabularyShard
from models.losses.metric_sums import MetricSums
from models.parallel.shard import sum_over_ranks

# exp() of it is 0, and it has finite products, unlike the logarithm of a mass of 0.
LOG_OF_NOTHING = -1e4


@dataclass(frozen=True)
class DistillOptions:
    """The terms of the loss: (1 - coef) x cross entropy + coef x temperature^2 x divergence."""

    coef: float
    temperature: float = 1.0
    divergence: Divergence = Divergence.forward


Known = tuple[torch.Tensor | None, torch.Tensor]
"""A teacher's distributions at some targets: its most probable tokens, int [n, k], and the log-probabilities of these
and, last, of all other tokens, [n, k + 1]; or None and the log-probabilities of all tokens (of this rank's shard)."""


class TeacherComparison:
    """The term of a loss (`ChunkTerm`) that compares a student with its teacher at the targets of a micro-batch."""

    def __init__(self, options: DistillOptions, find: Callable[[slice], Known], sums: MetricSums) -> None:
        """find: returns the distributions at a chunk of the targets, for each chunk once, in their order. sums: of
        temperature^2 x divergence over the targets."""
        self._options, self._find, self._sums = options, find, sums
        self.coef = options.coef

    def __call__(self, chunk: TargetChunk) -> torch.Tensor | None:
        """Add the divergences at the targets of the chunk to the sums. Return the gradient of coef x temperature^2 x
        their sum by the student's logits, [n, V]."""
        temperature = self._options.temperature
        token_ids, log_q = self._find(chunk.place)
        log_p = soften(chunk.log_probabilities, temperature, chunk.sharing)
        log_q = log_q.to(log_p.dtype)
        student = _Whole(log_p, chunk.sharing) if token_ids is None else _Joined(log_p, token_ids.long(), chunk.sharing)
        terms, weights = compare_events(student.log_probabilities, log_q, self._options.divergence)
        total = temperature**2 * student.sum(terms).sum(dtype=torch.float64)
        self._sums.add(total[None], len(log_p))
        if not chunk.needs_gradient:
            return None
        # d(T^2 D) / dz = T^2 / T x dD / d(z / T)
        return student.differentiate(weights).mul_(self.coef * temperature)


def soften(log_probabilities: torch.Tensor, temperature: float, sharing: VocabularyShard | None) -> torch.Tensor:
    """Return a copy of log-probabilities [n, V], at another temperature."""
    if temperature == 1:
        return log_probabilities.clone()
    # Of the whole vocabulary the largest is at least -log(its size), so no sum of exponentials is 0.
    scaled = log_probabilities / temperature
    sums = scaled.exp().sum(dim=-1, keepdim=True)  # [n, 1]
    if sharing is not None:
        sums = sum_over_ranks(sums, sharing.parallel)
    return scaled.sub_(sums.log_())


class _Whole:
    """A student's distribution over all tokens. log_probabilities: of those of this rank's shard, [n, V]."""

    def __init__(self, log_p: torch.Tensor, sharing: VocabularyShard | None) -> None:
        self.log_probabilities, self._sharing = log_p, sharing

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sums of values of events, [n, V], over all of them: [n, 1]."""
        sums = values.sum(dim=-1, keepdim=True)
        return sums if self._sharing is None else sum_over_ranks(sums, self._sharing.parallel)

    def differentiate(self, weights: torch.Tensor) -> torch.Tensor:
        """Return dD / d(z / T), [n, V]; overwrites the log-probabilities and `weights`, p_j g_j, [n, V]."""
        mean = self.sum(weights)
        return weights.sub_(self.log_probabilities.exp_().mul_(mean))


class _Joined:
    """A student's distribution over the teacher's k tokens and one event for all others. log_probabilities: of these
    events, [n, k + 1]. Overwrites the log-probabilities that it is made of."""

    def __init__(self, log_p: torch.Tensor, token_ids: torch.Tensor, sharing: VocabularyShard | None) -> None:
        self._index = token_ids
        self._is_here: torch.Tensor | None = None  # None: all of them
        if sharing is not None:
            self._index, self._is_here = sharing.locate(token_ids)
        chosen = log_p.gather(1, self._index)  # [n, k]
        p = log_p.exp_()
        # A token less itself is 0 exactly. Of tokens of another shard, the index is that of some token here.
        self._rest = p.scatter_add_(1, self._index, self._only_here(-p.gather(1, self._index)))  # [n, V]
        sums = torch.cat([self._only_here(chosen), self._rest.sum(dim=-1, keepdim=True)], dim=1)
        if sharing is not None:
            sums = sum_over_ranks(sums, sharing.parallel)
        self._rest_mass = sums[:, -1:].clamp(min=torch.finfo(sums.dtype).tiny)
        self.log_probabilities = torch.cat([sums[:, :-1], self._rest_mass.log()], dim=1)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sums of values of events, [n, k + 1], which all ranks know: [n, 1]."""
        return values.sum(dim=-1, keepdim=True)

    def differentiate(self, weights: torch.Tensor) -> torch.Tensor:
        """Return dD / d(z / T), [n, V], which takes the place of the probabilities. weights: p_j g_j, [n, k + 1]."""
        mean = weights.sum(dim=-1, keepdim=True)
        top = weights[:, :-1] - self.log_probabilities[:, :-1].exp() * mean
        gradient = self._rest.mul_(weights[:, -1:] / self._rest_mass - mean)
        return gradient.scatter_add_(1, self._index, self._only_here(top))

    def _only_here(self, values: torch.Tensor) -> torch.Tensor:
        return values if self._is_here is None else values * self._is_here


def compare_events(
    log_p: torch.Tensor, log_q: torch.Tensor, divergence: Divergence
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the terms of the divergence, whose sum over the last dimension it is, and p_j dD/dp_j, up to a constant
    times p_j, which changes no gradient. log_p, log_q: finite, both of one shape. In few copies: they may be as large
    as logits."""
    match divergence:
        case Divergence.forward:
            q = log_q.exp()
            return (log_q - log_p).mul_(q), q.neg_()
        case Divergence.reverse:
            terms = (log_p - log_q).mul_(log_p.exp())
            return terms, terms
        case Divergence.jensen_shannon:
            log_m = torch.logaddexp(log_p, log_q).sub_(math.log(2))
            weights = (log_p - log_m).mul_(log_p.exp()).div_(2)
            return (log_q - log_m).mul_(log_q.exp()).div_(2).add_(weights), weights
    raise AssertionError(divergence)


def choose_top(
    log_q: torch.Tensor, top_k: int, sharing: VocabularyShard | None, num_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a teacher's most probable tokens, int64 [n, k], and the log-probabilities of these and, last, of all
    others, [n, k + 1]. On all ranks that share the vocabulary.

    log_q: of this rank's tokens, [n, V]. num_tokens: those that may be chosen, the first of the vocabulary, at least k:
    rows of the head beyond them pad it, and belong to the others.
    """
    first = 0 if sharing is None else sharing.start
    known = log_q[:, : max(0, num_tokens - first)]
    values, token_ids = known.topk(min(top_k, known.shape[1]), dim=-1)  # [n, <= k]
    index, p = token_ids, log_q.exp()
    if sharing is not None:
        values, token_ids = _choose_over_ranks(values, token_ids + first, top_k, sharing)
        index, is_here = sharing.locate(token_ids)
    chosen = p.gather(1, index)
    chosen = chosen if sharing is None else chosen * is_here
    rest = p.scatter_add_(1, index, -chosen).sum(dim=-1, keepdim=True)  # [n, 1]
    if sharing is not None:
        rest = sum_over_ranks(rest, sharing.parallel)
    return token_ids, torch.cat([values, rest.log_()], dim=1).clamp_(min=LOG_OF_NOTHING)


def _choose_over_ranks(
    values: torch.Tensor, token_ids: torch.Tensor, top_k: int, sharing: VocabularyShard
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest of the values of all shards, [n, k], and their tokens. A shard may have fewer than k."""
    missing = top_k - values.shape[1]
    values = torch.nn.functional.pad(values, (0, missing), value=-math.inf)
    token_ids = torch.nn.functional.pad(token_ids, (0, missing))
    size, group = sharing.parallel.size, sharing.parallel.group
    all_values = [torch.empty_like(values) for _ in range(size)]
    all_ids = [torch.empty_like(token_ids) for _ in range(size)]
    dist.all_gather(all_values, values.contiguous(), group=group)
    dist.all_gather(all_ids, token_ids.contiguous(), group=group)
    values, places = torch.cat(all_values, dim=1).topk(top_k, dim=-1)
    return values, torch.cat(all_ids, dim=1).gather(1, places)
