"""Sequence parallelism (2205.05198): between the blocks of a layer, the tensor-parallel ranks have a part of each
sequence.

Norms, residuals and dropout work on single tokens, so tensor parallelism need not repeat them on every rank. A sharded
block needs all tokens: before it the parts are gathered, and its results, each rank's a share of the sum, are summed
and cut into parts again. A sum over ranks is these two one after the other, so the bytes are the same.

A projection at the start of a block keeps its rank's part for the backward pass, not the gathered tensor: there the
parts are gathered once more, which is the one exchange beyond tensor parallelism's.

B micro-batch, T sequence, S ranks, D hidden.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable
from transformers.pytorch_utils import Conv1D

from models.parallel.shard import TensorParallel


class Gathered:
    """The gathered inputs of a block, gathered again in its backward pass."""

    def __init__(self, parallel: TensorParallel) -> None:
        self._parallel = parallel
        self._whole: torch.Tensor | None = None

    def regather(self, part: torch.Tensor) -> torch.Tensor:
        """Gather [B, T, D] again, once until `forget`. All ranks call it."""
        if self._whole is None:
            self._whole = all_gather(part, self._parallel)
        return self._whole

    def forget(self) -> None:
        self._whole = None


class BlockInput:
    """Gathers the inputs of one block. Its projections look up the part that their inputs were gathered from."""

    def __init__(self, parallel: TensorParallel) -> None:
        self._parallel = parallel
        self.shape = torch.Size()  # of the last whole one
        self._last: tuple[weakref.ref[torch.Tensor], weakref.ref[torch.Tensor], Gathered] | None = None

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """Return [B, T, D] of the parts [B, T / S, D], whose gradients will be summed over the ranks."""
        gathered = Gathered(self._parallel)
        whole = _Gather.apply(part, self._parallel, gathered)
        self.shape, self._last = whole.shape, (weakref.ref(whole), weakref.ref(part), gathered)
        return whole

    def find_source(self, inputs: torch.Tensor) -> tuple[torch.Tensor, Gathered] | None:
        """Return the rank's part of `inputs`; None where they are not the block's own."""
        if self._last is None or self._last[0]() is not inputs:
            return None
        part = self._last[1]()
        return None if part is None else (part, self._last[2])


def gather_tokens(part: torch.Tensor, parallel: TensorParallel) -> torch.Tensor:
    """Return [B, T, D] of the parts [B, T / S, D], whose gradients will be summed over the ranks."""
    return _Gather.apply(part, parallel, Gathered(parallel))


def sum_tokens(share: torch.Tensor, parallel: TensorParallel) -> torch.Tensor:
    """Return this rank's part [B, T / S, D] of the sum of the ranks' shares [B, T, D], each of which gets the gradient
    of the whole."""
    return _SumTokens.apply(share, parallel)


class ColumnParallelLinear(nn.Linear):
    """A projection of which this rank has a shard of the outputs; it keeps only its part of the sequence for the
    backward pass."""

    entry: BlockInput | None = None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        source = _choose_source(self, inputs)
        return super().forward(inputs) if source is None else _multiply(self, inputs, source, is_transposed=False)


class ColumnParallelConv1D(Conv1D):
    """`ColumnParallelLinear` for GPT-2's projections, whose weight is [inputs, outputs]."""

    entry: BlockInput | None = None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        source = _choose_source(self, inputs)
        return super().forward(inputs) if source is None else _multiply(self, inputs, source, is_transposed=True)


def _choose_source(projection: Any, inputs: torch.Tensor) -> tuple[torch.Tensor, Gathered] | None:
    """Return the part to keep; None where nothing has to be kept: with a frozen weight, or without gradients."""
    keeps = torch.is_grad_enabled() and projection.weight.requires_grad and projection.entry is not None
    return projection.entry.find_source(inputs) if keeps else None


def _multiply(
    projection: Any, inputs: torch.Tensor, source: tuple[torch.Tensor, Gathered], is_transposed: bool
) -> torch.Tensor:
    part, gathered = source
    return _ColumnProduct.apply(inputs, projection.weight, projection.bias, part, gathered, is_transposed)


class _ColumnProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        part: torch.Tensor,
        gathered: Gathered,
        is_transposed: bool,
    ) -> torch.Tensor:
        context.save_for_backward(part, weight)
        context.gathered, context.is_transposed = gathered, is_transposed
        return nn.functional.linear(x, weight.t() if is_transposed else weight, bias)

    @staticmethod
    @once_differentiable
    def backward(context: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        part, weight = context.saved_tensors
        x, flat = context.gathered.regather(part).flatten(0, -2), dy.flatten(0, -2)
        grad_weight = x.t() @ flat if context.is_transposed else flat.t() @ x
        grad_bias = flat.sum(dim=0) if context.needs_input_grad[2] else None
        grad_x = None
        if context.needs_input_grad[0]:
            grad_x = dy @ (weight.t() if context.is_transposed else weight)
        else:  # no later backward would
            context.gathered.forget()
        return grad_x, grad_weight, grad_bias, None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, part: torch.Tensor, parallel: TensorParallel, gathered: Gathered) -> torch.Tensor:
        context.parallel, context.gathered = parallel, gathered
        return all_gather(part, parallel)

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        context.gathered.forget()  # the end of the block's backward pass
        return reduce_scatter(gradient, context.parallel), None, None


class _SumTokens(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, share: torch.Tensor, parallel: TensorParallel) -> torch.Tensor:
        context.parallel = parallel
        return reduce_scatter(share, parallel)

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return all_gather(gradient, context.parallel), None


def all_gather(part: torch.Tensor, parallel: TensorParallel) -> torch.Tensor:
    """Return [B, T, D] of the ranks' [B, T / S, D]. Without a group, as in a plan, repeats its own part."""
    parts = part.new_empty(parallel.size, *part.shape)
    if parallel.group is None:
        parts.copy_(part)
    else:
        dist.all_gather_into_tensor(parts.flatten(0, 1), part.contiguous(), group=parallel.group)
    return parts.movedim(0, 1).flatten(1, 2)


def reduce_scatter(share: torch.Tensor, parallel: TensorParallel) -> torch.Tensor:
    """Return this rank's part [B, T / S, D] of the sum of the ranks' [B, T, D]. Without a group, its own part."""
    parts = share.unflatten(1, (parallel.size, -1)).movedim(1, 0).contiguous()  # [S, B, T / S, D]
    if parallel.group is None:
        return parts[parallel.rank].clone()
    own = torch.empty_like(parts[0])
    dist.reduce_scatter_tensor(own, parts.flatten(0, 1), group=parallel.group)
    return own
