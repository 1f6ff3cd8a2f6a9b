"""The exact loss: token losses summed, over the number of target tokens of the global batch; and its logits, a piece at
a time.

The engine averages what this returns over micro-batches and data-parallel replicas. With M micro-batches in the global
batch (all replicas) and N target tokens, the loader sends `loss_denominator` = N / M along with the targets, and the
mean of `sum / (N / M)` is `sum over the global batch / N`, whatever the micro-batches hold. Its gradient follows.

N targets, D hidden, V vocabulary. The plain loss holds three fp32 tensors of [N, V] in its backward pass. Here logits
are made for a few targets at a time and turned into their own gradient at once, while they are there: no product is
computed twice, and what stays is one [N, V] in bf16, or none in fp32.

`sharing` below: the ranks that share the vocabulary, see `models/losses/logit_chunks.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from transformers import PretrainedConfig

from models.losses.logit_chunks import (
    LogitGradients,
    VocabularyShard,
    average_vocabulary,
    choose_targets,
    compute_log_probabilities,
    differentiate,
    list_pieces,
    predict,
    shard_vocabulary,
)
from models.parallel.shard import NO_CP, NO_TP, ContextParallel, TensorParallel, sum_parts

IGNORE_INDEX = -100

Loss = Callable[[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]], torch.Tensor]


def build_loss(config: PretrainedConfig, parallel: TensorParallel = NO_TP) -> Loss:
    """The loss of the model that `config` describes: some families cap their logits. parallel: who shares its head."""
    return partial(causal_lm_loss, logit_softcap=get_softcap(config), sharing=shard_vocabulary(config, parallel))


def get_softcap(config: PretrainedConfig) -> float | None:
    names = ("final_logit_softcapping", "logits_soft_cap")
    return next((cap for name in names if (cap := getattr(config, name, None))), None)


def causal_lm_loss(
    outputs: tuple[torch.Tensor, torch.Tensor],
    targets: tuple[torch.Tensor, ...],
    logit_softcap: float | None = None,
    sharing: VocabularyShard | None = None,
    *,
    label_smoothing: float = 0.0,
    num_correct: torch.Tensor | None = None,
) -> torch.Tensor:
    """Next-token cross entropy of one micro-batch.

    outputs: hidden_states [B, T, D] after the final norm, head weight [V, D].
    targets: the token to predict at each place, int64 [B, T], -100 where there is none; the scalar
        `loss_denominator`; and `target_indices`, see `find_targets`. These are Hugging Face's labels shifted by one
        place, which the loader has done: nothing here depends on what is beside a token.
    logit_softcap: logits become c * tanh(logits / c) (Gemma 2, 2408.00118).
    sharing: the head weight has these tokens alone.
    label_smoothing: e of a token's loss (1 - e) * -log p(target) + e * the mean of -log p over the vocabulary
        (1512.00567), as that of torch's cross_entropy.
    num_correct: int64 scalar, to which the number of targets with the largest logit is added; without gradients alone.
    Returns a scalar, fp32 at least. Logits are made only where there is a target: prompts and padding cost nothing.
    """
    hidden_states, weight = outputs
    target_ids, loss_denominator, *known = targets
    indices = find_targets(target_ids, *known)
    chosen, target_ids = _choose_rows(hidden_states, indices), _choose_rows(target_ids, indices)  # [N, D], [N]
    needs_gradient = torch.is_grad_enabled() and (chosen.requires_grad or weight.requires_grad)
    # A gradient in fp16 needs the loss scale before it is rounded, and that is known in the backward pass only
    if weight.dtype is torch.float16 and needs_gradient:
        logits = F.linear(chosen, weight)
        if logit_softcap is not None:
            logits = logit_softcap * torch.tanh(logits / logit_softcap)
        loss = F.cross_entropy(logits.float(), target_ids, reduction="sum", label_smoothing=label_smoothing)
        return loss / loss_denominator.float()
    assert num_correct is None or not needs_gradient
    way = LossOptions(logit_softcap, label_smoothing, sharing, num_correct)
    return _LinearCrossEntropy.apply(chosen, weight, target_ids, loss_denominator, way, needs_gradient)


def find_targets(target_ids: torch.Tensor, known: torch.Tensor | None = None) -> torch.Tensor:
    """Where the targets are in the flattened micro-batch, int64 [N].

    known: what the loader has found, and handed out beside them. Found here instead, on a GPU, the host waits for all
    that the device has been given so far, since N is a size.
    """
    return (target_ids.flatten() != IGNORE_INDEX).nonzero().squeeze(1) if known is None else known


def _choose_rows(of_places: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """[B, T, ...] -> [N, ...]."""
    return of_places.flatten(0, 1).index_select(0, indices)


@dataclass(frozen=True)
class LossOptions:
    """How the loss is computed; see `causal_lm_loss`."""

    logit_softcap: float | None
    label_smoothing: float
    sharing: VocabularyShard | None
    num_correct: torch.Tensor | None


class _LinearCrossEntropy(torch.autograd.Function):
    """Sum of cross entropies of `hidden @ weight.T` over the denominator; the gradient is made in the forward pass."""

    @staticmethod
    def forward(
        context: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        target_ids: torch.Tensor,
        denominator: torch.Tensor,
        way: LossOptions,
        needs_gradient: bool,
    ) -> torch.Tensor:
        dtype = torch.promote_types(weight.dtype, torch.float32)
        gradients = LogitGradients(hidden, weight, context.needs_input_grad[1], way.sharing) if needs_gradient else None
        loss = hidden.new_zeros((), dtype=dtype)
        for piece in list_pieces(hidden, weight, way.sharing):
            loss += _sum_piece(piece, hidden, weight, target_ids, way=way, gradients=gradients)
        context.gradients, context.denominator = gradients, denominator.to(dtype)
        return loss / context.denominator

    @staticmethod
    @once_differentiable
    def backward(context: Any, of_loss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_hidden, grad_weight = context.gradients.finish(of_loss / context.denominator)
        context.gradients = None  # the graph outlives its backward pass, since the engine keeps the loss
        return grad_hidden, grad_weight, None, None, None, None


def _sum_piece(
    piece: slice,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target_ids: torch.Tensor,
    *,
    way: LossOptions,
    gradients: LogitGradients | None,
) -> torch.Tensor:
    """The sum of the cross entropies of some rows of `hidden`; their gradient goes to `gradients`. All else that is
    made here goes.
    """
    wanted, sharing, smoothing = target_ids[piece], way.sharing, way.label_smoothing
    log_probabilities, tanh_logits = compute_log_probabilities(hidden[piece], weight, way.logit_softcap, sharing)
    loss = -choose_targets(log_probabilities, wanted, sharing).sum()
    if smoothing:
        loss = (1 - smoothing) * loss - smoothing * average_vocabulary(log_probabilities, sharing).sum()
    if way.num_correct is not None:
        way.num_correct.add_((predict(log_probabilities, sharing) == wanted).sum())
    if gradients is not None:
        gradients.add(piece, differentiate(log_probabilities, tanh_logits, wanted, sharing, smoothing))
    return loss


def sequence_log_probabilities(
    outputs: tuple[torch.Tensor, torch.Tensor],
    target_ids: torch.Tensor,
    target_indices: torch.Tensor,
    logit_softcap: float | None = None,
    sharing: VocabularyShard | None = None,
    sequence_part: ContextParallel = NO_CP,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The log-probability of each row's targets, summed, and their number: both float64 [B]. Arguments as in
    `causal_lm_loss`; target_indices: see `find_targets`. sequence_part: what this rank has of each row; the sums are
    those of the whole rows, on each rank of the group.

    For losses that are not sums over tokens. Differentiable; logits are made a piece at a time, and again in the
    backward pass.
    """
    hidden_states, weight = outputs
    of_targets = _TargetLogProbabilities.apply(
        _choose_rows(hidden_states, target_indices),
        weight,
        _choose_rows(target_ids, target_indices),
        logit_softcap,
        sharing,
    )  # [N]
    # Added up in float64: what a preference is about is a small difference of such sums.
    of_tokens = torch.zeros(target_ids.numel(), dtype=torch.float64, device=target_ids.device)
    of_tokens = of_tokens.index_copy(0, target_indices, of_targets.double()).view_as(target_ids)
    of_rows = torch.stack([of_tokens.sum(dim=1), (target_ids != IGNORE_INDEX).sum(dim=1).double()])
    log_probabilities, num_targets = sum_parts(of_rows, sequence_part)
    return log_probabilities, num_targets


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
            choose_targets(
                compute_log_probabilities(hidden[piece], weight, logit_softcap, sharing)[0], target_ids[piece], sharing
            )
            for piece in list_pieces(hidden, weight, sharing)
        ]
        return (
            torch.cat(pieces) if pieces else hidden.new_zeros(0, dtype=torch.promote_types(weight.dtype, torch.float32))
        )

    @staticmethod
    @once_differentiable
    def backward(context: Any, of_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, target_ids = context.saved_tensors
        sharing = context.sharing
        gradients = LogitGradients(hidden, weight, context.needs_input_grad[1], sharing)
        for piece in list_pieces(hidden, weight, sharing):
            log_probabilities, tanh_logits = compute_log_probabilities(
                hidden[piece], weight, context.logit_softcap, sharing
            )
            of_logits = differentiate(log_probabilities, tanh_logits, target_ids[piece], sharing)
            gradients.add(piece, of_logits.mul_(-of_outputs[piece].unsqueeze(1)))
        grad_hidden, grad_weight = gradients.finish()
        return grad_hidden, grad_weight, None, None, None
