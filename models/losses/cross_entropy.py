"""The exact loss: token losses summed, over the number of target tokens of the global batch; and its logits, a piece at
a time.

The engine averages what this returns over micro-batches and data-parallel replicas. With M micro-batches in the global
batch (all replicas) and N target tokens, the loader sends `loss_denominator` = N / M along with the targets, and the
mean of `sum / (N / M)` is `sum over the global batch / N`, whatever the micro-batches hold. Its gradient follows.

N targets, D hidden, V vocabulary. The plain loss holds three fp32 tensors of [N, V] in its backward pass. Here logits
are made for a few targets at a time and turned into their own gradient at once, while they are there: no product is
computed twice, and what stays is one [N, V] in bf16, or none in fp32.

With tensor parallelism a rank has the logits of its own tokens only. The ranks of the group exchange the largest
logit and the sum of the exponentials of each target, and its own logit: three numbers a target, never the logits.
`sharing` below is such a group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from transformers import PretrainedConfig

from models.parallel.shard import ALONE, TensorParallel, split_evenly, sum_over_ranks

IGNORE_INDEX = -100
PIECE = 2**25  # logits in one piece: 128 MiB in fp32, few enough to be small, many enough to keep a matrix product busy


Loss = Callable[[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]], torch.Tensor]


def build_loss(config: PretrainedConfig, parallel: TensorParallel = ALONE) -> Loss:
    """The loss of the model that `config` describes: some families cap their logits. parallel: who shares its head."""
    return partial(causal_lm_loss, logit_softcap=get_softcap(config), sharing=shard_vocabulary(config, parallel))


def get_softcap(config: PretrainedConfig) -> float | None:
    return getattr(config, "final_logit_softcapping", None)


@dataclass(frozen=True)
class VocabularyShard:
    """The tokens `start` to `stop` of the vocabulary, which this rank's head has; `widest`: the most of any rank."""

    start: int
    stop: int
    widest: int
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
    return VocabularyShard(*intervals[parallel.rank], widest=intervals[0][1], parallel=parallel)


def causal_lm_loss(
    outputs: tuple[torch.Tensor, torch.Tensor],
    targets: tuple[torch.Tensor, torch.Tensor],
    logit_softcap: float | None = None,
    sharing: VocabularyShard | None = None,
) -> torch.Tensor:
    """Next-token cross entropy of one micro-batch.

    outputs: hidden_states [B, T, D] after the final norm, head weight [V, D].
    targets: the token to predict at each place, int64 [B, T], -100 where there is none, and the scalar
        `loss_denominator`. These are Hugging Face's labels shifted by one place, which the loader has done: nothing
        here depends on what is beside a token.
    logit_softcap: logits become c * tanh(logits / c) (Gemma 2, 2408.00118).
    sharing: the head weight has these tokens alone.
    Returns a scalar, fp32 at least. Logits are made only where there is a target: prompts and padding cost nothing.
    """
    hidden_states, weight = outputs
    target_ids, loss_denominator = targets
    has_target = target_ids != IGNORE_INDEX
    chosen, target_ids = hidden_states[has_target], target_ids[has_target]  # [N, D], [N]
    if (
        weight.dtype is torch.float16
    ):  # its gradient needs the loss scale before it is rounded, and that is known in the backward pass only
        logits = F.linear(chosen, weight)
        if logit_softcap is not None:
            logits = logit_softcap * torch.tanh(logits / logit_softcap)
        return F.cross_entropy(logits.float(), target_ids, reduction="sum") / loss_denominator.float()
    needs_gradient = torch.is_grad_enabled() and (chosen.requires_grad or weight.requires_grad)
    return _LinearCrossEntropy.apply(
        chosen, weight, target_ids, loss_denominator, logit_softcap, needs_gradient, sharing
    )


class _LinearCrossEntropy(torch.autograd.Function):
    """Sum of cross entropies of `hidden @ weight.T` over the denominator; the gradient is made in the forward pass."""

    @staticmethod
    def forward(
        context: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        target_ids: torch.Tensor,
        denominator: torch.Tensor,
        logit_softcap: float | None,
        needs_gradient: bool,
        sharing: VocabularyShard | None,
    ) -> torch.Tensor:
        dtype = torch.promote_types(weight.dtype, torch.float32)
        gradients = _Gradients(hidden, weight, context.needs_input_grad[1], sharing) if needs_gradient else None
        loss = hidden.new_zeros((), dtype=dtype)
        for piece in _list_pieces(hidden, weight, sharing):
            loss += _sum_piece(
                piece, hidden, weight, target_ids, logit_softcap=logit_softcap, gradients=gradients, sharing=sharing
            )
        context.gradients, context.denominator = gradients, denominator.to(dtype)
        return loss / context.denominator

    @staticmethod
    @once_differentiable
    def backward(context: Any, of_loss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        of_hidden, of_weight = context.gradients.finish(of_loss / context.denominator)
        context.gradients = None  # the graph outlives its backward pass, since the engine keeps the loss
        return of_hidden, of_weight, None, None, None, None, None


def _sum_piece(
    piece: slice,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target_ids: torch.Tensor,
    *,
    logit_softcap: float | None,
    gradients: _Gradients | None,
    sharing: VocabularyShard | None,
) -> torch.Tensor:
    """The sum of the cross entropies of some rows of `hidden`; their gradient goes to `gradients`. All else that is
    made here goes.
    """
    log_probabilities, squashed = _compute_log_probabilities(hidden[piece], weight, logit_softcap, sharing)
    loss = -_choose(log_probabilities, target_ids[piece], sharing).sum()
    if gradients is not None:
        gradients.add(piece, _differentiate(log_probabilities, squashed, target_ids[piece], sharing))
    return loss


def _compute_log_probabilities(
    hidden: torch.Tensor, weight: torch.Tensor, logit_softcap: float | None, sharing: VocabularyShard | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Of all tokens that the weight has, [n, V], fp32 at least; and the tanh of the logits where they are capped."""
    logits, squashed = F.linear(hidden, weight), None  # [n, V]
    if logit_softcap is not None:
        squashed = torch.tanh(logits / logit_softcap)
        logits = logit_softcap * squashed
    dtype = torch.promote_types(weight.dtype, torch.float32)
    if sharing is None:
        return F.log_softmax(logits, dim=-1, dtype=dtype), squashed
    logits = logits.to(dtype)
    largest = logits.amax(dim=-1, keepdim=True)  # [n, 1]
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=sharing.parallel.group)
    exponentials = sum_over_ranks((logits - largest).exp_().sum(dim=-1, keepdim=True), sharing.parallel)
    return logits.sub_(largest + exponentials.log_()), squashed


def _choose(log_probabilities: torch.Tensor, target_ids: torch.Tensor, sharing: VocabularyShard | None) -> torch.Tensor:
    """Those of the targets, [n]."""
    if sharing is None:
        return log_probabilities.gather(1, target_ids.unsqueeze(1)).squeeze(1)
    place, is_here = sharing.locate(target_ids)
    return sum_over_ranks(
        log_probabilities.gather(1, place.unsqueeze(1)).squeeze(1).masked_fill(~is_here, 0), sharing.parallel
    )


def _differentiate(
    log_probabilities: torch.Tensor,
    squashed: torch.Tensor | None,
    target_ids: torch.Tensor,
    sharing: VocabularyShard | None,
) -> torch.Tensor:
    """The gradient of the targets' cross entropies by the logits, [n, V], in place of `log_probabilities`."""
    probabilities = log_probabilities.exp_()
    if sharing is None:
        place, less = target_ids, probabilities.new_full((), -1).expand_as(target_ids)
    else:
        place, is_here = sharing.locate(target_ids)
        less = -is_here.to(probabilities.dtype)
    of_logits = probabilities.scatter_add_(1, place.unsqueeze(1), less.unsqueeze(1))
    if squashed is not None:
        of_logits.mul_(1 - squashed.to(of_logits.dtype).square())
    return of_logits


def sequence_log_probabilities(
    outputs: tuple[torch.Tensor, torch.Tensor],
    target_ids: torch.Tensor,
    logit_softcap: float | None = None,
    sharing: VocabularyShard | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The log-probability of each row's targets, summed, and their number: both float64 [B]. Arguments as in
    `causal_lm_loss`.

    For losses that are not sums over tokens. Differentiable; logits are made a piece at a time, and again in the
    backward pass.
    """
    hidden_states, weight = outputs
    has_target = target_ids != IGNORE_INDEX  # [B, T]
    of_targets = _TargetLogProbabilities.apply(
        hidden_states[has_target], weight, target_ids[has_target], logit_softcap, sharing
    )  # [N]
    # Added up in float64: what a preference is about is a small difference of such sums.
    of_tokens = torch.zeros(has_target.shape, dtype=torch.float64, device=target_ids.device).masked_scatter(
        has_target, of_targets.double()
    )
    return of_tokens.sum(dim=1), has_target.sum(dim=1).double()


class _TargetLogProbabilities(torch.autograd.Function):
    """log softmax(`hidden @ weight.T`) at each row's target, [N], fp32 at least."""

    @staticmethod
    def forward(
        context: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        target_ids: torch.Tensor,
        logit_softcap: float | None,
        sharing: VocabularyShard | None,
    ) -> torch.Tensor:
        context.save_for_backward(hidden, weight, target_ids)
        context.logit_softcap, context.sharing = logit_softcap, sharing
        pieces = [
            _choose(
                _compute_log_probabilities(hidden[piece], weight, logit_softcap, sharing)[0], target_ids[piece], sharing
            )
            for piece in _list_pieces(hidden, weight, sharing)
        ]
        return (
            torch.cat(pieces) if pieces else hidden.new_zeros(0, dtype=torch.promote_types(weight.dtype, torch.float32))
        )

    @staticmethod
    @once_differentiable
    def backward(context: Any, of_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, target_ids = context.saved_tensors
        sharing = context.sharing
        gradients = _Gradients(hidden, weight, context.needs_input_grad[1], sharing)
        for piece in _list_pieces(hidden, weight, sharing):
            log_probabilities, squashed = _compute_log_probabilities(
                hidden[piece], weight, context.logit_softcap, sharing
            )
            of_logits = _differentiate(log_probabilities, squashed, target_ids[piece], sharing)
            gradients.add(piece, of_logits.mul_(-of_outputs[piece].unsqueeze(1)))
        of_hidden, of_weight = gradients.finish()
        return of_hidden, of_weight, None, None, None


def _list_pieces(hidden: torch.Tensor, weight: torch.Tensor, sharing: VocabularyShard | None) -> list[slice]:
    """The same on all ranks that share the vocabulary, whatever each has of it."""
    rows = max(1, PIECE // (weight.shape[0] if sharing is None else sharing.widest))
    return [slice(start, start + rows) for start in range(0, len(hidden), rows)]


class _Gradients:
    """The gradients of hidden states and weight, put together from pieces of the logits' gradient.

    A weight in fp32 adds up its gradient piece by piece. In 16 bits each sum would be rounded, so the pieces wait, and
    one product makes it, as in the plain loss. A frozen weight has none. What the hidden states get is summed over the
    ranks that share the vocabulary.
    """

    def __init__(
        self, hidden: torch.Tensor, weight: torch.Tensor, weight_trains: bool, sharing: VocabularyShard | None
    ) -> None:
        self._hidden, self._weight, self._sharing = hidden, weight, sharing
        self._of_hidden = torch.empty_like(hidden)
        waits = weight_trains and weight.dtype in (torch.bfloat16, torch.float16)
        self._of_logits = weight.new_empty(len(hidden), len(weight)) if waits else None
        self._of_weight = torch.zeros_like(weight) if weight_trains and not waits else None

    def add(self, piece: slice, of_logits: torch.Tensor) -> None:
        """of_logits: [n, V], fp32 at least."""
        if self._of_logits is not None:
            of_logits = self._of_logits[piece].copy_(of_logits)
        else:
            of_logits = of_logits.to(self._weight.dtype)
        torch.mm(of_logits, self._weight, out=self._of_hidden[piece])
        if self._of_weight is not None:
            self._of_weight.addmm_(of_logits.T, self._hidden[piece])

    def finish(self, factor: torch.Tensor | float = 1.0) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Both gradients, times `factor`."""
        if self._of_logits is not None:
            self._of_weight = self._of_logits.T @ self._hidden
            self._of_logits = None
        if self._sharing is not None:
            self._of_hidden = sum_over_ranks(self._of_hidden, self._sharing.parallel)
        return self._of_hidden.mul_(factor), self._of_weight.mul_(factor) if self._of_weight is not None else None
