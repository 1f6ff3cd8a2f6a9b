"""The exact loss: the sum of token losses over the number of target tokens of the global batch, with logits computed in
chunks.

The engine averages what this returns over micro-batches and data-parallel replicas. With M micro-batches in the global
batch (all replicas) and N target tokens, the loader sends N / M along with the targets as their denominator, and the
mean of `sum / (N / M)` is `sum over the global batch / N`, whatever the micro-batches hold. Its gradient follows.

N targets, D hidden, V vocabulary. The plain loss holds three fp32 tensors of [N, V] in its backward pass. Here the
logits of a few targets at a time are computed and turned into their own gradient at once: no product is computed twice,
and only one [N, V] in bf16 is kept, or none in fp32.

`sharing` below: the ranks that share the vocabulary, see `models/losses/logit_chunks.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from transformers import PretrainedConfig

from batch import Targets
from models.losses.logit_chunks import (
    LogitGradients,
    VocabularyShard,
    average_vocabulary,
    choose_targets,
    compute_log_probabilities,
    differentiate,
    differentiate_cap,
    list_chunks,
    shard_vocabulary,
)
from models.parallel.shard import NO_CP, NO_TP, ContextParallel, TensorParallel, sum_parts

Loss = Callable[[tuple[torch.Tensor, torch.Tensor], Targets], torch.Tensor]


@dataclass(frozen=True)
class TargetChunk:
    """n of the targets of a micro-batch, whose logits are in memory."""

    place: slice  # where they are among the targets of the micro-batch
    target_ids: torch.Tensor  # int64 [n]
    log_probabilities: torch.Tensor  # [n, V], of the tokens of this rank; not to be changed
    sharing: VocabularyShard | None
    needs_gradient: bool


class ChunkTerm(Protocol):
    """A term that the loss has besides the cross entropy: its gradient is added, its value is not reported as part of
    the loss.

    coef: what the term takes of the cross entropy, whose gradient is multiplied by 1 - coef.
    """

    @property
    def coef(self) -> float: ...

    def __call__(self, chunk: TargetChunk) -> torch.Tensor | None:
        """Return the gradient of the term by the logits of the chunk, [n, V]; None if it has none, or it is not
        needed. It is called with the chunks of a micro-batch in their order."""
        ...


def build_loss(config: PretrainedConfig, parallel: TensorParallel = NO_TP) -> Loss:
    """Build the loss of the model that `config` describes, which may cap its logits. parallel: the ranks that share the
    head."""
    return partial(causal_lm_loss, logit_softcap=get_softcap(config), sharing=shard_vocabulary(config, parallel))


def get_softcap(config: PretrainedConfig) -> float | None:
    """Return the cap on the logits; None without one."""
    names = ("final_logit_softcapping", "logits_soft_cap")
    return next((cap for name in names if (cap := getattr(config, name, None))), None)


def causal_lm_loss(
    outputs: tuple[torch.Tensor, torch.Tensor],
    targets: Targets,
    logit_softcap: float | None = None,
    sharing: VocabularyShard | None = None,
    *,
    label_smoothing: float = 0.0,
    terms: Sequence[ChunkTerm] = (),
) -> torch.Tensor:
    """Compute the next-token cross entropy of one micro-batch.

    outputs: hidden_states [B, T, D] after the final norm, head weight [V, D].
    targets: Hugging Face's labels, already shifted by the loader, so no position depends on its neighbors.
    logit_softcap: logits become c * tanh(logits / c) (Gemma 2, 2408.00118).
    sharing: the tokens of the head weight that this rank holds.
    label_smoothing: e in a token's loss (1 - e) * -log p(target) + e * the mean of -log p over the vocabulary
        (1512.00567), as that of torch's cross_entropy.
    terms: what the gradient has in addition; what is returned stays the cross entropy. Not in fp16.
    Returns a scalar, fp32 at least. Logits are computed only where there is a target: prompts and padding cost nothing.
    """
    hidden_states, weight = outputs
    chosen = _choose_rows(hidden_states, targets.indices)  # [N, D]
    target_ids = _choose_rows(targets.ids, targets.indices)  # [N]
    needs_gradient = torch.is_grad_enabled() and (chosen.requires_grad or weight.requires_grad)
    # A gradient in fp16 needs the loss scale before it is rounded, which is known only in the backward pass.
    if weight.dtype is torch.float16 and needs_gradient:
        assert not terms
        logits = F.linear(chosen, weight)
        if logit_softcap is not None:
            logits = logit_softcap * torch.tanh(logits / logit_softcap)
        loss = F.cross_entropy(logits.float(), target_ids, reduction="sum", label_smoothing=label_smoothing)
        return loss / targets.denominator.float()
    options = LossOptions(logit_softcap, label_smoothing, sharing, terms)
    return _LinearCrossEntropy.apply(chosen, weight, target_ids, targets.denominator, options, needs_gradient)


def _choose_rows(values: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """[B, T, ...] -> [N, ...]."""
    return values.flatten(0, 1).index_select(0, indices)


@dataclass(frozen=True)
class LossOptions:
    """Options of the loss; see `causal_lm_loss`."""

    logit_softcap: float | None
    label_smoothing: float
    sharing: VocabularyShard | None
    terms: Sequence[ChunkTerm]


class _LinearCrossEntropy(torch.autograd.Function):
    """Sum of cross entropies of `hidden @ weight.T` over the denominator; the forward pass computes the gradient."""

    @staticmethod
    def forward(
        context: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        target_ids: torch.Tensor,
        denominator: torch.Tensor,
        options: LossOptions,
        needs_gradient: bool,
    ) -> torch.Tensor:
        dtype = torch.promote_types(weight.dtype, torch.float32)
        gradients = (
            LogitGradients(hidden, weight, context.needs_input_grad[1], options.sharing) if needs_gradient else None
        )
        loss = hidden.new_zeros((), dtype=dtype)
        for chunk in list_chunks(hidden, weight, options.sharing):
            loss += _sum_chunk(chunk, hidden, weight, target_ids, options=options, gradients=gradients)
        context.gradients, context.denominator = gradients, denominator.to(dtype)
        return loss / context.denominator

    @staticmethod
    @once_differentiable
    def backward(context: Any, grad_loss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_hidden, grad_weight = context.gradients.finish(grad_loss / context.denominator)
        context.gradients = None  # the graph outlives its backward pass, since the engine keeps the loss
        return grad_hidden, grad_weight, None, None, None, None


def _sum_chunk(
    chunk: slice,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target_ids: torch.Tensor,
    *,
    options: LossOptions,
    gradients: LogitGradients | None,
) -> torch.Tensor:
    """Return the sum of the cross entropies of some rows of `hidden`, and add their gradient to `gradients`."""
    wanted, sharing, smoothing = target_ids[chunk], options.sharing, options.label_smoothing
    log_probabilities, tanh_logits = compute_log_probabilities(hidden[chunk], weight, options.logit_softcap, sharing)
    loss = -choose_targets(log_probabilities, wanted, sharing).sum()
    if smoothing:
        loss = (1 - smoothing) * loss - smoothing * average_vocabulary(log_probabilities, sharing).sum()
    place = TargetChunk(chunk, wanted, log_probabilities, sharing, gradients is not None)
    added = [(term.coef, term(place)) for term in options.terms]
    if gradients is not None:
        grad_logits = differentiate(log_probabilities, wanted, sharing, smoothing)
        for coef, gradient in added:
            if gradient is not None:
                grad_logits = gradient.add_(grad_logits, alpha=1 - coef)
        gradients.add(chunk, differentiate_cap(grad_logits, tanh_logits))
    return loss


def document_log_probabilities(
    outputs: tuple[torch.Tensor, torch.Tensor],
    targets: Targets,
    logit_softcap: float | None = None,
    sharing: VocabularyShard | None = None,
    sequence_part: ContextParallel = NO_CP,
) -> torch.Tensor:
    """Return the sum of the log-probabilities of each document's targets, float64 [D].

    For losses that are not sums over tokens. Differentiable; logits are computed in chunks, and again in the backward
    pass. Arguments as in `causal_lm_loss`. targets: with the columns of `DOCUMENT_SUMS` (`data/loading/columns.py`):
    the document of each target, [N], and the targets of each document, [D]. sequence_part: the part of each row that
    this rank holds; the sums are those of whole documents, on each rank of the group.
    """
    hidden_states, weight = outputs
    target_log_probabilities = _TargetLogProbabilities.apply(
        _choose_rows(hidden_states, targets.indices),
        weight,
        _choose_rows(targets.ids, targets.indices),
        logit_softcap,
        sharing,
    )  # [N]
    # Summed in float64: losses take small differences of such sums.
    documents, none = targets.columns["target_documents"], torch.zeros_like(targets.columns["num_targets"])
    return sum_parts(none.index_add(0, documents, target_log_probabilities.double()), sequence_part)


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
        chunks = [
            choose_targets(
                compute_log_probabilities(hidden[chunk], weight, logit_softcap, sharing)[0], target_ids[chunk], sharing
            )
            for chunk in list_chunks(hidden, weight, sharing)
        ]
        return (
            torch.cat(chunks) if chunks else hidden.new_zeros(0, dtype=torch.promote_types(weight.dtype, torch.float32))
        )

    @staticmethod
    @once_differentiable
    def backward(context: Any, grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, target_ids = context.saved_tensors
        sharing = context.sharing
        gradients = LogitGradients(hidden, weight, context.needs_input_grad[1], sharing)
        for chunk in list_chunks(hidden, weight, sharing):
            log_probabilities, tanh_logits = compute_log_probabilities(
                hidden[chunk], weight, context.logit_softcap, sharing
            )
            grad_logits = differentiate_cap(differentiate(log_probabilities, target_ids[chunk], sharing), tanh_logits)
            gradients.add(chunk, grad_logits.mul_(-grad_outputs[chunk].unsqueeze(1)))
        grad_hidden, grad_weight = gradients.finish()
        return grad_hidden, grad_weight, None, None, None
