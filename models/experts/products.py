"""Products of rows with the matrices of their groups, and their gradients.

Rows are sorted by group, and `offsets` hold where each group's rows end. torch's own grouped product (2.13) has no
fp64, takes only bf16 while compiling and on the meta device, and needs rows whose bytes are a multiple of 16; the
operator here has no such limits.

S rows, E groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import library, nn

_ALIGNMENT = 16  # bytes; `check_valid_strides_and_return_transposed` of ATen/native/GroupedMMUtils.h, torch 2.13


@library.custom_op("experts::grouped_mm", mutates_args=())
def grouped_mm(left: torch.Tensor, right: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Multiply left [S, in] by right [E, in, out] to [S, out]; or left [out, S] by right [S, in] to [E, out, in], zeros
    where a group has no rows. offsets: int32 [E].

    One kernel in bf16 on GPUs of compute capability 9 and 10; elsewhere torch multiplies group after group, and the
    host waits for the GPU.
    """
    return multiply_groups(left, right, offsets)


def multiply_groups(left: torch.Tensor, right: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Compute `grouped_mm`, for the operators that multiply more than once."""
    if not left.numel() or not right.numel():  # none of a rank's experts has a row, as the host knows
        return _make_output(left, right, offsets).zero_()
    if left.dtype is torch.float64 or not (_has_aligned_rows(left) and _has_aligned_rows(right)):
        return _multiply_each_group(left, right, offsets)
    # torch pads the rows of the result to `_ALIGNMENT`, and a compiler is told that they are not (`_make_output`)
    return nn.functional.grouped_mm(_align(left), _align(right), offs=offsets).contiguous()


@grouped_mm.register_fake
def _make_output(left: torch.Tensor, right: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    if right.ndim == 3:
        return left.new_empty(left.shape[0], right.shape[2])
    return left.new_empty(offsets.shape[0], left.shape[0], right.shape[1])


def _has_aligned_rows(matrix: torch.Tensor) -> bool:
    return max(matrix.stride()[-2:]) * matrix.dtype.itemsize % _ALIGNMENT == 0


def _align(matrix: torch.Tensor) -> torch.Tensor:
    """Copy a matrix that is not aligned: a GPU's kernel reads from whole 16 bytes, and a weight may lie anywhere in the
    buffer of an optimizer."""
    return matrix.clone() if matrix.is_cuda and matrix.data_ptr() % _ALIGNMENT else matrix


def _multiply_each_group(left: torch.Tensor, right: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    ends = offsets.tolist()
    outputs = _make_output(left, right, offsets)
    for group, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        if right.ndim == 3:
            torch.mm(left[start:end], right[group], out=outputs[start:end])
        else:
            torch.mm(left[:, start:end], right[start:end], out=outputs[group])
    return outputs


class GroupedProduct(NamedTuple):
    """The gradient of the matrices of a stack, to be computed: rows [S, in], or the tensor that they are gathered from
    by tokens, int64 [S]; the gradients of the products, [S, out]."""

    weight: nn.Parameter
    is_transposed: bool
    offsets: torch.Tensor
    rows: torch.Tensor
    tokens: torch.Tensor | None
    gradient: torch.Tensor

    @property
    def kept(self) -> tuple[torch.Tensor, ...]:
        """The tensors that wait for it."""
        return self.rows, self.gradient, *(() if self.tokens is None else (self.tokens,))

    def compute(self) -> torch.Tensor:
        """Return the gradient, [E, out, in] ([E, in, out] where transposed)."""
        rows = self.rows if self.tokens is None else self.rows.index_select(0, self.tokens)
        rows = rows.to(self.gradient.dtype)
        left, right = (rows, self.gradient) if self.is_transposed else (self.gradient, rows)
        return grouped_mm(left.t(), right, self.offsets)

    def add(self, lend_sum: Callable[[nn.Parameter], torch.Tensor | None]) -> Iterator[nn.Parameter]:
        """Add the gradient to the sum that is lent for the weight, if one is, else to `.grad`; yield the weight."""
        total = lend_sum(self.weight) if self.weight.grad is None else self.weight.grad
        if total is None:
            self.weight.grad = self.compute()
        else:
            total.add_(self.compute())
        yield self.weight


class Deferral(Protocol):
    """Where products go that a backward pass puts off; None while it puts off none."""

    products: list[Any] | None


class _GroupedLinear(torch.autograd.Function):
    """rows may be source[tokens]: then those are kept for the backward pass, and the rows are gathered again."""

    @staticmethod
    def forward(
        context: Any,
        rows: torch.Tensor,
        weight: torch.Tensor,
        offsets: torch.Tensor,
        transposed: bool,
        source: torch.Tensor | None,
        tokens: torch.Tensor | None,
        parameter: nn.Parameter | None,
        deferral: Deferral | None,
    ) -> torch.Tensor:
        kept = (rows, None) if source is None else (source, tokens)
        context.transposed, context.parameter, context.deferral = transposed, parameter, deferral
        context.save_for_backward(weight, offsets, *(kept if weight.requires_grad else (None, None)))
        return grouped_mm(rows, weight if transposed else weight.transpose(1, 2), offsets)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        weight, offsets, rows, tokens = context.saved_tensors
        gradient = gradient.contiguous()
        row_gradients = weight_gradient = None
        if context.needs_input_grad[0]:
            row_gradients = grouped_mm(gradient, weight.transpose(1, 2) if context.transposed else weight, offsets)
        if context.needs_input_grad[1]:
            product = GroupedProduct(context.parameter, context.transposed, offsets, rows, tokens, gradient)
            if context.deferral is None or context.deferral.products is None:
                weight_gradient = product.compute()
            else:
                context.deferral.products.append(product)
        return row_gradients, weight_gradient, *(None,) * 6


def grouped_linear(
    rows: torch.Tensor,
    weight: torch.Tensor,
    offsets: torch.Tensor,
    *,
    transposed: bool = False,
    source: torch.Tensor | None = None,
    tokens: torch.Tensor | None = None,
    deferral: Deferral | None = None,
) -> torch.Tensor:
    """Multiply each row by its group's matrix: rows [S, in], weight [E, out, in] ([E, in, out] where transposed).

    offsets: int32 [E], where each group's rows end. source, tokens: rows are source[tokens], and the backward pass may
    gather them again instead of keeping them. deferral: where a backward pass may put off the gradient of the weight,
    a parameter. Returns [S, out].
    """
    if source is not None:
        source = source.detach()
    parameter = None if deferral is None else weight
    return _GroupedLinear.apply(  # type: ignore[no-any-return]
        rows.to(weight.dtype), weight, offsets, transposed, source, tokens, parameter, deferral
    )
