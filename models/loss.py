"""The exact loss: token losses summed, over the number of target tokens of the global batch.

The engine averages what this returns over micro-batches and data-parallel replicas. With M micro-batches in the global batch
(all replicas) and N target tokens, the loader sends `loss_denominator` = N / M along with the labels, and the mean of
`sum / (N / M)` is `sum over the global batch / N`, whatever the micro-batches hold. Its gradient follows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional as F
from transformers import PretrainedConfig

IGNORE_INDEX = -100


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
    logits = F.linear(hidden_states[:, :-1][has_target], weight)  # [N, V]
    if logit_softcap is not None:
        logits = logit_softcap * torch.tanh(logits / logit_softcap)
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    return F.cross_entropy(logits, shifted[has_target], reduction="sum") / loss_denominator.to(logits.dtype)
