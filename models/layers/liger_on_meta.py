"""The kernels of `models/layers/liger.py` on the meta device, for a plan: what each of them reads and writes, and what
autograd keeps of it, without triton.

A kernel is one operator of torch here, with the tensors that it takes and makes; the copies that `liger.py` makes
before a kernel writes into its inputs are made here too. Read in liger-kernel 0.8.5 (liger_kernel/ops/rms_norm.py,
swiglu.py, rope.py). The partial sums of a norm's gradient, one row for each multiprocessor, count as one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import library

_KERNELS = library.Library("liger_on_meta", "DEF")


def _kernel(signature: str) -> Callable[[Callable[..., Any]], Any]:
    """Define an operator of this signature that makes what the decorated function returns; returns the operator."""

    def define(make: Callable[..., Any]) -> Any:
        name = _KERNELS.define(signature)
        _KERNELS.impl(name, make, "Meta")
        return getattr(torch.ops.liger_on_meta, name)

    return define


@_kernel("normalize(Tensor x, Tensor weight) -> (Tensor, Tensor)")
def _normalize(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)


@_kernel("normalize_backward(Tensor gradient, Tensor x, Tensor weight, Tensor scales) -> (Tensor, Tensor)")
def _normalize_backward(
    gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), weight.new_empty(1, *weight.shape, dtype=torch.float32)


@_kernel("multiply_gated(Tensor gate, Tensor up) -> Tensor")
def _multiply_gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(gate)


@_kernel("multiply_gated_backward(Tensor gradient, Tensor(a!) gate, Tensor(b!) up) -> (Tensor(a!), Tensor(b!))")
def _multiply_gated_backward(
    gradient: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return gate, up  # which their gradients are written to


@_kernel("rotate(Tensor(a!) query, Tensor(b!) key, Tensor cos, Tensor sin) -> (Tensor(a!), Tensor(b!))")
def _rotate(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return query, key


def normalize(hidden_states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As `liger.normalize`."""
    return _RMSNorm.apply(hidden_states, weight)  # type: ignore[no-any-return]


def multiply_gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """As `liger.multiply_gated`."""
    return _SwiGLU.apply(gate, up)  # type: ignore[no-any-return]


def rotate(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `liger.rotate`."""
    return _Rotary.apply(query, key, cos, sin)  # type: ignore[no-any-return]


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        result, scales = _normalize(x, weight)
        context.save_for_backward(x, weight, scales)
        return result  # type: ignore[no-any-return]

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight, scales = context.saved_tensors
        grad_x, sums = _normalize_backward(gradient.contiguous(), x, weight, scales)
        return grad_x, sums.sum(dim=0).to(weight.dtype)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        context.save_for_backward(gate, up)
        return _multiply_gated(gate, up)  # type: ignore[no-any-return]

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = (saved.clone() for saved in context.saved_tensors)
        return _multiply_gated_backward(gradient.contiguous(), gate, up)  # type: ignore[no-any-return]


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        context.save_for_backward(cos, sin)
        return _rotate(query.clone(), key.clone(), cos, sin)  # type: ignore[no-any-return]

    @staticmethod
    def backward(context: Any, grad_query: torch.Tensor, grad_key: torch.Tensor) -> tuple[Any, ...]:
        return *_rotate(grad_query.clone(), grad_key.clone(), *context.saved_tensors), None, None
