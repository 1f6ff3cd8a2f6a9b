"""The exact loss: token losses summed, over the number of target tokens of the global batch; and its logits, a piece at a time.

The engine averages what this returns over micro-batches and data-parallel replicas. With M micro-batches in the global batch
(all replicas) and N target tokens, the loader sends `loss_denominator` = N / M along with the labels, and the mean of
`sum / (N / M)` is `sum over the global batch / N`, whatever the micro-batches hold. Its gradient follows.

N targets, D hidden, V vocabulary. The plain loss holds three fp32 tensors of [N, V] in its backward pass. Here logits are made for a few
targets at a time and turned into their own gradient at once, while they are there: no product is computed twice, and what stays is
one [N, V] in bf16, or none in fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from transformers import PretrainedConfig

IGNORE_INDEX = -100
PIECE = 2**25  # logits in one piece: 128 MiB in fp32, few enough to be small, many enough to keep a matrix product busy


Loss = Callable[[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]], torch.Tensor]


def build_loss(config: PretrainedConfig) -> Loss:
    """The loss of the model that `config` describes: some families cap their logits."""
    return partial(causal_lm_loss, logit_softcap=getattr(config, "final_logit_softcapping", None))


def causal_lm_loss(
    outputs: tuple[torch.Tensor, torch.Tensor], targets: tuple[torch.Tensor, torch.Tensor], logit_softcap: float | None = None
) -> torch.Tensor:
    """Next-token cross entropy of one micro-batch.

    outputs: hidden_states [B, T, D] after the final norm, head weight [V, D].
    targets: labels [B, T] aligned with input_ids and -100 where ignored (shifted here, as in Hugging Face), and the scalar
        `loss_denominator`.
    logit_softcap: logits become c * tanh(logits / c) (Gemma 2, 2408.00118).
    Returns a scalar, fp32 at least. Logits are made only where there is a target: prompts and padding cost nothing.
    """
    hidden_states, weight = outputs
    labels, loss_denominator = targets
    shifted = labels[:, 1:]  # [B, T - 1]
    has_target = shifted != IGNORE_INDEX
    chosen, target_ids = hidden_states[:, :-1][has_target], shifted[has_target]  # [N, D], [N]
    if weight.dtype is torch.float16:  # its gradient needs the loss scale before it is rounded, and that is known in the backward pass only
        logits = F.linear(chosen, weight)
        if logit_softcap is not None:
            logits = logit_softcap * torch.tanh(logits / logit_softcap)
        return F.cross_entropy(logits.float(), target_ids, reduction="sum") / loss_denominator.float()
    needs_gradient = torch.is_grad_enabled() and (chosen.requires_grad or weight.requires_grad)
    return _LinearCrossEntropy.apply(chosen, weight, target_ids, loss_denominator, logit_softcap, needs_gradient)


class _LinearCrossEntropy(torch.autograd.Function):
    """sum of cross entropies of `hidden @ weight.T`, over the denominator, with its gradient made in the forward pass."""

    @staticmethod
    def forward(
        context: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        target_ids: torch.Tensor,
        denominator: torch.Tensor,
        logit_softcap: float | None,
        needs_gradient: bool,
    ) -> torch.Tensor:
        dtype = torch.promote_types(weight.dtype, torch.float32)
        gradients = _Gradients(hidden, weight, context.needs_input_grad[1]) if needs_gradient else None
        loss = hidden.new_zeros((), dtype=dtype)
        rows = max(1, PIECE // weight.shape[0])
        for start in range(0, len(hidden), rows):
            piece = slice(start, start + rows)
            loss += _sum_piece(piece, hidden, weight, target_ids, logit_softcap, gradients)
        context.gradients, context.denominator = gradients, denominator.to(dtype)
        return loss / context.denominator

    @staticmethod
    @once_differentiable
    def backward(context: Any, of_loss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        of_hidden, of_weight = context.gradients.finish(of_loss / context.denominator)
        context.gradients = None  # the graph outlives its backward pass, since the engine keeps the loss
        return of_hidden, of_weight, None, None, None, None


def _sum_piece(
    piece: slice, hidden: torch.Tensor, weight: torch.Tensor, target_ids: torch.Tensor, logit_softcap: float | None, gradients: _Gradients | None
) -> torch.Tensor:
    """The sum of the cross entropies of some rows of `hidden`; their gradient goes to `gradients`. All else that is made here goes."""
    logits, squashed = F.linear(hidden[piece], weight), None  # [n, V]
    if logit_softcap is not None:
        squashed = torch.tanh(logits / logit_softcap)
        logits = logit_softcap * squashed
    log_probabilities = F.log_softmax(logits, dim=-1, dtype=torch.promote_types(weight.dtype, torch.float32))
    own = target_ids[piece].unsqueeze(1)  # [n, 1]
    loss = -log_probabilities.gather(1, own).sum()
    if gradients is not None:
        probabilities = log_probabilities.exp_()
        of_logits = probabilities.scatter_add_(1, own, probabilities.new_full((), -1).expand_as(own))
        if squashed is not None:
            of_logits.mul_(1 - squashed.to(of_logits.dtype).square())
        gradients.add(piece, of_logits)
    return loss


class _Gradients:
    """The gradients of hidden states and weight, put together from pieces of the logits' gradient.

    A weight in fp32 adds up its gradient piece by piece. In bf16 each sum would be rounded, so the pieces wait, and one product makes
    it, as in the plain loss. A frozen weight has none.
    """

    def __init__(self, hidden: torch.Tensor, weight: torch.Tensor, weight_trains: bool) -> None:
        self._hidden, self._weight = hidden, weight
        self._of_hidden = torch.empty_like(hidden)
        waits = weight_trains and weight.dtype is torch.bfloat16
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

    def finish(self, factor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Both gradients, times `factor`."""
        if self._of_logits is not None:
            self._of_weight = self._of_logits.T @ self._hidden
            self._of_logits = None
        return self._of_hidden.mul_(factor), self._of_weight.mul_(factor) if self._of_weight is not None else None
