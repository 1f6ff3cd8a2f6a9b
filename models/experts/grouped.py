"""The experts of a layer, computed by grouped matrix products: one sort, one gather, no loop over experts.

Registered with `transformers` as an experts implementation, so its own modules call it; the differences between
families (a gate of their own, biases, transposed weights) are read from those modules (`use_experts_implementation`,
5.23).

N tokens, K experts a token, E experts, D hidden, I intermediate, S = N x K rows: a row is a token at one of its
experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.activations import SiLUActivation
from transformers.integrations import moe

from models.experts.adapted_products import adapted_linear
from models.experts.exchange import plan_route
from models.experts.frozen import frozen_linear
from models.experts.products import grouped_linear
from models.experts.rows import add_bias, combine, gather, weighted_swiglu
from models.layers.frozen import FrozenStack
from models.parallel.shard import NO_EP

GROUPED = "grouped"


@dataclass(frozen=True)
class Dispatch:
    """The assignment of rows to experts: rows are sorted by expert.

    order: int64 [S], the row's place among (token, choice) pairs. positions: int64 [N, K], the row of each such pair.
    tokens: int64 [S], the row's token. experts: int64 [S], its expert. offsets: int32 [E], where each expert's rows
    end.
    """

    order: torch.Tensor
    positions: torch.Tensor
    tokens: torch.Tensor
    experts: torch.Tensor
    offsets: torch.Tensor


def dispatch(top_k_index: torch.Tensor, num_experts: int) -> Dispatch:
    """Sort the rows by expert. top_k_index: [N, K], the experts of each token."""
    experts, order = torch.sort(top_k_index.reshape(-1), stable=True)
    rows = torch.arange(len(order), device=order.device)
    positions = torch.empty_like(order).scatter_(0, order, rows).view_as(top_k_index)
    numbers = torch.arange(num_experts, device=order.device)
    offsets = torch.searchsorted(experts, numbers, right=True, out_int32=True)
    return Dispatch(order, positions, order // top_k_index.shape[-1], experts, offsets)


def project(
    experts: Any, name: str, rows: torch.Tensor, where: Dispatch, source: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the rows through one of the stacked projections of the module, such as "gate_up_proj".

    source: the tensor that the rows were gathered from, where they need not be kept for the backward pass.
    """
    weight, tokens = getattr(experts, name), None if source is None else where.tokens
    options: Any = {"transposed": experts.is_transposed, "source": source, "tokens": tokens}
    low_rank = getattr(experts, "low_rank", {})  # adapters: models/experts/lora.py
    factors = low_rank[name]() if name in low_rank else None
    if isinstance(weight, FrozenStack):
        outputs = frozen_linear(rows, weight, factors, where.offsets, **options)
    elif factors is not None:
        outputs = adapted_linear(rows, weight, factors, where.offsets, **options)
    else:
        outputs = grouped_linear(rows, weight, where.offsets, **options, deferral=getattr(experts, "deferral", None))
    if not experts.has_bias:
        return outputs
    # Where ranks have the whole bias and their outputs are summed, each adds a share
    bias = getattr(experts, "bias_shares", {}).get(name, 1) * getattr(experts, f"{name}_bias")
    return add_bias(outputs, bias, where.experts, where.offsets)


def is_stack(module: nn.Module) -> bool:
    """Return whether the module is one of `transformers`' stacked experts (`use_experts_implementation`, 5.23)."""
    return hasattr(module, "is_transposed")


def is_transposed_to_peft(experts: Any) -> bool:
    """Return whether peft treats the stack as [experts, in, out]. It mistakes a Llama 4's outputs for inputs, since the
    module does not declare its layout, so that its A and B are swapped."""
    return getattr(experts, "is_transposed_to_peft", experts.is_transposed)


def compute_experts(
    experts: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Return [N, D]: the weighted sum of the experts' outputs for each token. top_k_index, top_k_weights: [N, K]. The
    only place that decides on which rank a row is computed: on that which has its expert."""
    parallel = getattr(experts, "expert_parallel", NO_EP)
    if parallel.size == 1:
        return _compute_rows(experts, hidden_states, top_k_index, top_k_weights, experts.num_experts)
    where = dispatch(top_k_index, experts.num_experts)
    rows, weights = _gather_rows(hidden_states, top_k_weights, where)
    route = plan_route(where.offsets, where.experts, parallel)
    num_own = experts.num_experts // parallel.size
    outputs = _compute_rows(experts, route.send(rows), route.experts, route.send(weights), num_own)
    return combine(route.bring_back(outputs), where.tokens, where.positions).to(hidden_states.dtype)


def _gather_rows(
    hidden_states: torch.Tensor, top_k_weights: torch.Tensor, where: Dispatch
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows [S, D], sorted by expert, and their weights [S, 1]."""
    rows = gather(hidden_states, where.tokens, where.positions)
    return rows, gather(top_k_weights.reshape(-1, 1), where.order, where.positions.view(-1, 1))


def _compute_rows(
    experts: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor, num_experts: int
) -> torch.Tensor:
    """Compute `compute_experts` by this rank's experts, of which there are `num_experts`."""
    where = dispatch(top_k_index, num_experts)
    rows, weights = _gather_rows(hidden_states, top_k_weights, where)
    inner = project(experts, "gate_up_proj" if experts.has_gate else "up_proj", rows, where, hidden_states)
    del rows  # freed unless the backward pass needs them
    if _weighs_inner(experts):
        outputs = project(experts, "down_proj", weighted_swiglu(inner, weights), where)
    else:
        inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)  # [S, I]
        outputs = project(experts, "down_proj", inner, where)
        outputs = (experts.post_expert_norm(outputs) if experts.has_post_expert_norm else outputs) * weights
    return combine(outputs, where.tokens, where.positions).to(hidden_states.dtype)


def _weighs_inner(experts: Any) -> bool:
    """Return whether the weights are applied with SwiGLU, before the last projection. The result is the same where all
    later operations are linear, and then the backward pass does not need the outputs of the experts."""
    if experts.has_bias or experts.has_post_expert_norm or not experts.has_gate:
        return False
    return type(experts)._apply_gate is moe._default_apply_gate and isinstance(
        experts.act_fn, (nn.SiLU, SiLUActivation)
    )


moe.ALL_EXPERTS_FUNCTIONS.register(GROUPED, compute_experts)
