"""The experts of a layer, computed by grouped matrix products: one sort, one gather, no loop over experts.

Registered with `transformers` as an experts implementation, so its own modules call it; what differs between families
(a gate of their own, biases, transposed weights) those modules say (`use_experts_implementation`, 5.23).

N tokens, K experts a token, E experts, D hidden, I intermediate, S = N x K rows: a row is a token
at one of its experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

GROUPED = "grouped"


@dataclass(frozen=True)
class Dispatch:
    """Which rows go to which expert: rows are sorted by expert.

    order: int64 [S], the row's place among (token, choice) pairs. tokens: int64 [S], its token. experts: int64 [S], its
    expert. offsets: int32 [E], where each expert's rows end.
    """

    order: torch.Tensor
    tokens: torch.Tensor
    experts: torch.Tensor
    offsets: torch.Tensor


def dispatch(top_k_index: torch.Tensor, num_experts: int) -> Dispatch:
    """top_k_index: [N, K], the experts of each token. The one place that decides where a token is computed."""
    experts, order = torch.sort(top_k_index.reshape(-1), stable=True)
    counts = torch.zeros(num_experts, dtype=torch.int32, device=experts.device)
    counts.index_add_(0, experts, torch.ones_like(experts, dtype=torch.int32))
    return Dispatch(order, order // top_k_index.shape[-1], experts, counts.cumsum(0, dtype=torch.int32))


def grouped_linear(
    rows: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, *, transposed: bool = False
) -> torch.Tensor:
    """Each row times its expert's matrix: rows [S, in], weight [E, out, in] ([E, in, out] where transposed).

    offsets: int32 [E], where each expert's rows end. Returns [S, out].
    """
    matrices = weight if transposed else weight.transpose(-2, -1)
    return nn.functional.grouped_mm(rows.to(weight.dtype), matrices, offs=offsets)


def project(experts: Any, name: str, rows: torch.Tensor, where: Dispatch) -> torch.Tensor:
    """The rows through one of the stacked projections of the module, such as "gate_up_proj"."""
    outputs = grouped_linear(rows, getattr(experts, name), where.offsets, transposed=experts.is_transposed)
    if not experts.has_bias:
        return outputs
    # Of a bias that ranks have whole and whose outputs they sum, each adds a share
    share = getattr(experts, "bias_shares", {}).get(name, 1)
    return outputs + share * getattr(experts, f"{name}_bias")[where.experts]


def compute_experts(
    experts: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """[N, D]: the weighted sum of what its experts make of each token. top_k_index, top_k_weights: [N, K]."""
    where = dispatch(top_k_index, experts.num_experts)
    rows = hidden_states[where.tokens]  # [S, D]
    inner = project(experts, "gate_up_proj" if experts.has_gate else "up_proj", rows, where)
    inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)  # [S, I]
    outputs = project(experts, "down_proj", inner, where)
    if experts.has_post_expert_norm:
        outputs = experts.post_expert_norm(outputs)
    weighted = outputs * top_k_weights.reshape(-1)[where.order].unsqueeze(-1)
    unsorted = torch.empty_like(weighted).index_copy(0, where.order, weighted)
    return unsorted.view(*top_k_index.shape, -1).sum(dim=1).to(hidden_states.dtype)


ALL_EXPERTS_FUNCTIONS.register(GROUPED, compute_experts)
