"""Gathering tokens into rows, combining rows into tokens, and elementwise work on rows, with few passes over memory.

A token has K rows, one at each of its experts. Gathering rows and summing the rows of a token are each other's backward
pass. Every sum is computed at its destination, so it is deterministic, and no tensor is copied only to reorder it.

N tokens, K experts a token, S = N x K rows, sorted by expert, D hidden, I intermediate.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional as F

_BLOCK_NUMEL = 2**16  # of a block's widest tensor: intermediate results stay in a core's cache


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, source: torch.Tensor, index: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(positions)
        return source.index_select(0, index)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        (positions,) = context.saved_tensors
        return _sum_rows(gradient, positions), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, rows: torch.Tensor, index: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(index)
        return _sum_rows(rows, positions)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        (index,) = context.saved_tensors
        return gradient.index_select(0, index), None, None


def _sum_rows(rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return [N, D], each the sum of K rows in fp32. rows [S, D], positions [N, K]."""
    return F.embedding_bag(positions, rows.detach(), mode="sum")


def gather(source: torch.Tensor, index: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return source[index], [S, D]. source [N, D], index [S]. positions: [N, K], the rows that each row of source is
    gathered into."""
    return _Gather.apply(source, index, positions)  # type: ignore[no-any-return]


def combine(rows: torch.Tensor, index: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return [N, D], the sum of each token's rows. rows [S, D], positions [N, K]. index: [S], the token of each row."""
    return _Combine.apply(rows, index, positions)  # type: ignore[no-any-return]


class _AddBias(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, rows: torch.Tensor, bias: torch.Tensor, experts: torch.Tensor, offsets: torch.Tensor
    ) -> torch.Tensor:
        context.save_for_backward(offsets)
        return rows + bias.index_select(0, experts)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        (offsets,) = context.saved_tensors
        starts = F.pad(offsets[:-1], (1, 0))
        rows = torch.arange(len(gradient), dtype=starts.dtype, device=starts.device)
        return gradient, F.embedding_bag(rows, gradient, starts, mode="sum"), None, None


def add_bias(rows: torch.Tensor, bias: torch.Tensor, experts: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Return rows [S, D] plus bias[experts], bias [E, D]. experts: int64 [S], sorted. offsets: int32 [E], where each
    expert's rows end."""
    return _AddBias.apply(rows, bias, experts, offsets)  # type: ignore[no-any-return]


class _WeightedSwiGLU(torch.autograd.Function):
    """Keeps only its inputs for the backward pass, and recomputes the rest."""

    @staticmethod
    def forward(context: Any, gate_up: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(gate_up, weights)
        outputs = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
        for block in _list_blocks(gate_up):
            gate, up = gate_up[block].chunk(2, dim=-1)
            _write_product(outputs[block], F.silu(gate).mul_(up), weights[block])
        return outputs

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        gate_up, weights = context.saved_tensors
        grad_gate_up, grad_weights = torch.empty_like(gate_up), torch.empty_like(weights)
        # Some routers hand over fp32 weights of rows in bf16 (Mixtral), or in the fp64 of a proof: sums have the wider
        # dtype, and are rounded to that of the weights at their end
        dtype = torch.promote_types(gate_up.dtype, weights.dtype)
        for block in _list_blocks(gate_up):
            gate, up = gate_up[block].chunk(2, dim=-1)
            grad_gate, grad_up = grad_gate_up[block].chunk(2, dim=-1)
            unweighted = F.silu(gate).mul_(gradient[block])
            grad_weights[block] = (unweighted * up).sum(dim=-1, keepdim=True, dtype=dtype)
            _write_product(grad_up, unweighted, weights[block])
            grad_activated = (gradient[block] * up).mul_(weights[block])
            _write_silu_gradient(grad_gate, grad_activated, gate)
        return grad_gate_up, grad_weights


# The compiler does not let an operator write into a part of a tensor (torch 2.13, gb0242), and does not need it to.
def _write_product(target: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    if torch.compiler.is_compiling():
        target.copy_(left * right)
    else:
        torch.mul(left, right, out=target)


def _write_silu_gradient(target: torch.Tensor, gradient: torch.Tensor, inputs: torch.Tensor) -> None:
    if torch.compiler.is_compiling():
        target.copy_(torch.ops.aten.silu_backward(gradient, inputs))
    else:
        torch.ops.aten.silu_backward.grad_input(gradient, inputs, grad_input=target)


def _list_blocks(rows: torch.Tensor) -> Iterator[slice]:
    """Yield slices of rows: few rows at a time on a CPU; all at once on a GPU, and for the compiler, which fuses these
    operations."""
    whole = rows.device.type != "cpu" or torch.compiler.is_compiling()
    size = max(1, len(rows) if whole else _BLOCK_NUMEL // rows.shape[1])
    for start in range(0, len(rows), size):
        yield slice(start, start + size)


def weighted_swiglu(gate_up: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return weights x silu(gate) x up, [S, I]: gate_up [S, 2 x I], weights [S, 1]."""
    return _WeightedSwiGLU.apply(gate_up, weights)  # type: ignore[no-any-return]
