"""Products of rows with the matrices of their groups, plus products of low rank (LoRA, 2106.09685): x W + x A B.

A product of low rank is little work on much memory. On a CPU it is therefore computed group by group, while the rows of
a group and their products are in a core's cache; no tensor but inputs and results is as large as all rows. On a GPU
each of the products is one kernel.

S rows, sorted by group; E groups; r the rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import library

from models.experts.products import grouped_mm, multiply_groups


@library.custom_op("experts::adapted_mm", mutates_args=())
def adapted_mm(
    rows: torch.Tensor, weight: torch.Tensor, first: torch.Tensor, second: torch.Tensor, offsets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x W + x A B, [S, out], and the inner rows x A, [S, r], for the backward pass. rows [S, in], weight [E, in,
    out], first [E, r, in], second [E, r, out], offsets: int32 [E], where each group's rows end."""
    if not _takes_groups_in_turn(rows):
        inner = multiply_groups(rows, first.transpose(1, 2), offsets)
        outputs = multiply_groups(rows, weight, offsets)
        return outputs.add_(multiply_groups(inner, second, offsets)), inner
    outputs, inner = _make_outputs(rows, weight, first, second, offsets)
    parts = (_split(tensor, offsets) for tensor in (rows, outputs, inner))
    for x, y, h, matrix, down, up in zip(*parts, weight, first, second, strict=True):
        torch.mm(x, matrix, out=y)  # the large product first: it waits least for memory that is not in the cache
        torch.mm(x, down.t(), out=h)
        y.addmm_(h, up)
    return outputs, inner


@adapted_mm.register_fake
def _make_outputs(
    rows: torch.Tensor, weight: torch.Tensor, first: torch.Tensor, second: torch.Tensor, offsets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return rows.new_empty(len(rows), weight.shape[2]), rows.new_empty(len(rows), first.shape[1])


@library.custom_op("experts::adapted_mm_backward", mutates_args=())
def adapted_mm_backward(
    gradient: torch.Tensor,
    weight: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    inner: torch.Tensor,
    source: torch.Tensor,
    tokens: torch.Tensor | None,
    offsets: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of rows, first and second. gradient [S, out], weight [E, out, in], source: the rows, or the
    tensor that they were gathered from by tokens, int64 [S]; the rest as in `adapted_mm`."""
    if not _takes_groups_in_turn(gradient):
        rows = source if tokens is None else source.index_select(0, tokens)
        inner_gradient = multiply_groups(gradient, second.transpose(1, 2), offsets)
        row_gradients = multiply_groups(gradient, weight, offsets).add_(multiply_groups(inner_gradient, first, offsets))
        return (
            row_gradients,
            multiply_groups(inner_gradient.t(), rows, offsets),
            multiply_groups(inner.t(), gradient, offsets),
        )
    row_gradients, first_gradient, second_gradient = _make_gradients(
        gradient, weight, first, second, inner, source, tokens, offsets
    )
    parts = (
        _split(tensor, offsets) for tensor in (gradient, row_gradients, inner, source if tokens is None else tokens)
    )
    matrices = (weight, first, second, first_gradient, second_gradient)
    for grad_y, grad_x, h, x, matrix, down, up, grad_down, grad_up in zip(*parts, *matrices, strict=True):
        torch.mm(grad_y, matrix, out=grad_x)
        torch.mm(h.t(), grad_y, out=grad_up)
        grad_h = grad_y @ up.t()
        grad_x.addmm_(grad_h, down)
        torch.mm(grad_h.t(), x if tokens is None else source.index_select(0, x), out=grad_down)
    return row_gradients, first_gradient, second_gradient


@adapted_mm_backward.register_fake
def _make_gradients(
    gradient: torch.Tensor,
    weight: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    inner: torch.Tensor,
    source: torch.Tensor,
    tokens: torch.Tensor | None,
    offsets: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    row_gradients = gradient.new_empty(len(gradient), weight.shape[2])
    return row_gradients, first.new_empty(first.shape), second.new_empty(second.shape)


def _takes_groups_in_turn(rows: torch.Tensor) -> bool:
    return rows.device.type == "cpu"


def _split(rows: torch.Tensor, offsets: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the rows of each group as views; empty for a group without rows."""
    return rows.split(offsets.diff(prepend=offsets.new_zeros(1)).tolist())


class _AdaptedLinear(torch.autograd.Function):
    """`_GroupedLinear` with the two low-rank factors as further inputs."""

    @staticmethod
    def forward(
        context: Any,
        rows: torch.Tensor,
        weight: torch.Tensor,
        first: torch.Tensor,
        second: torch.Tensor,
        offsets: torch.Tensor,
        transposed: bool,
        source: torch.Tensor | None,
        tokens: torch.Tensor | None,
    ) -> torch.Tensor:
        context.transposed = transposed
        outputs, inner = adapted_mm(rows, weight if transposed else weight.transpose(1, 2), first, second, offsets)
        kept = (rows, None) if source is None else (source, tokens)
        context.save_for_backward(weight, first, second, inner, *kept, offsets)
        return outputs

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        weight, first, second, inner, source, tokens, offsets = context.saved_tensors
        gradient, source = gradient.contiguous(), source.to(gradient.dtype)
        weight_gradient = None
        if context.needs_input_grad[1]:
            rows = source if tokens is None else source.index_select(0, tokens)
            left, right = (rows, gradient) if context.transposed else (gradient, rows)
            weight_gradient = grouped_mm(left.t(), right, offsets)
        weight = weight.transpose(1, 2) if context.transposed else weight
        row_gradients, first_gradient, second_gradient = adapted_mm_backward(
            gradient, weight, first, second, inner, source, tokens, offsets
        )
        return row_gradients, weight_gradient, first_gradient, second_gradient, None, None, None, None


def adapted_linear(
    rows: torch.Tensor,
    weight: torch.Tensor,
    factors: tuple[torch.Tensor, torch.Tensor],
    offsets: torch.Tensor,
    *,
    transposed: bool = False,
    source: torch.Tensor | None = None,
    tokens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute `grouped_linear` plus the product with low-rank factors [E, r, in] and [E, r, out]. Returns [S, out]."""
    if source is not None:
        source = source.detach()
    first, second = (factor.to(weight.dtype).contiguous() for factor in factors)
    rows = rows.to(weight.dtype)
    return _AdaptedLinear.apply(rows, weight, first, second, offsets, transposed, source, tokens)  # type: ignore[no-any-return]
