"""Three of liger-kernel's Triton kernels as torch functions, none of which writes into its inputs.

Its own functions do (0.8.5): RMSNorm's backward into the incoming gradient, SwiGLU's backward into the saved gate and
up projections, rotary's forward and backward into queries, keys and their gradients, and no version counter notices.
Selective checkpointing reuses those projections, and a backward pass split in two may need the gradients again; so
tensors that would be written to are copied first, which costs a read and a write where the kernels save several.

Imports liger-kernel, and with it triton; `models.layers.fused_kernels.find_obstacle` says where that is possible. B
micro-batch, T sequence, D hidden, I intermediate, H heads, E head size.
"""

from __future__ import annotations

from typing import Any

import torch
from liger_kernel.ops import LigerRMSNormFunction
from liger_kernel.ops.rope import rope_backward, rope_forward
from liger_kernel.ops.swiglu import swiglu_backward, swiglu_forward


def normalize(hidden_states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return Llama's RMSNorm over the last dimension: statistics in fp32, the weight applied in the input's dtype."""
    offset, casting_mode, in_place = 0.0, "llama", False
    return LigerRMSNormFunction.apply(hidden_states, weight, eps, offset, casting_mode, in_place)


def multiply_gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up, both [B, T, I]."""
    return _SwiGLU.apply(gate, up)


def rotate(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply Llama's rotary positions: query and key [B, heads, T, E], cos and sin [B, T, E]."""
    return _Rotary.apply(query, key, cos, sin)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        context.save_for_backward(gate, up)
        return swiglu_forward(gate, up)[2]

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = (saved.clone() for saved in context.saved_tensors)
        grad_gate, grad_up = swiglu_backward(gate, up, gradient.contiguous())
        return grad_gate.view_as(gate), grad_up.view_as(up)


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        context.save_for_backward(cos, sin)
        return rope_forward(query.clone(), key.clone(), cos, sin)[:2]

    @staticmethod
    def backward(context: Any, grad_query: torch.Tensor, grad_key: torch.Tensor) -> tuple[Any, ...]:
        return *rope_backward(grad_query.clone(), grad_key.clone(), *context.saved_tensors), None, None
