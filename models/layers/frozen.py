"""Frozen matrices that stay quantized, and projections with such a matrix, which each product dequantizes.

E matrices of R x C numbers; a projection has one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import library, nn
from torch.nn.functional import linear

from models.layers import fp8, int4, mxfp4, nf4


class Form(Protocol):
    """A form in which matrices are kept: a module of `models/layers/`."""

    @property
    def WORK_BYTES(self) -> float:
        """Bytes of a number that is dequantized, besides the result."""

    @property
    def HAS_PROJECTIONS(self) -> bool:
        """Whether projections have this form too, or experts alone."""

    def count_bytes(self, rows: int, columns: int) -> int:
        """Return the bytes of a matrix."""

    def dequantize(self, parts: tuple[torch.Tensor, ...], shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        """Return matrices [n, R, C] in `dtype`. parts: tensors [n, ...]. shape: R and C."""


FORMS: dict[str, Form] = {"nf4": nf4, "fp8": fp8, "mxfp4": mxfp4, "int4": int4}


@dataclass(frozen=True, eq=False)
class FrozenStack:
    """The frozen matrices of a layer's experts, in place of the parameter of their module; or that of a projection."""

    form: str  # a key of `FORMS`
    parts: tuple[torch.Tensor, ...]  # what they are kept in, each [E, ...]
    shape: torch.Size  # [E, R, C]: of the parameter, [E, out, in], or [E, in, out] where the module's are transposed
    dtype: torch.dtype  # of the rows that they are multiplied with

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def to(self, device: torch.device) -> FrozenStack:
        """Return the stack on a device."""
        return replace(self, parts=tuple(part.to(device) for part in self.parts))

    def dequantize(self, experts: slice) -> torch.Tensor:
        """Return the matrices of a run of experts, of the shape of the parameter but for the first dimension."""
        parts = tuple(part[experts] for part in self.parts)
        return FORMS[self.form].dequantize(parts, (self.shape[1], self.shape[2]), self.dtype)


def count_stack_bytes(form: str, shape: Sequence[int]) -> int:
    """Return the bytes of matrices of this shape, [E, R, C] or [R, C]."""
    experts = shape[0] if len(shape) == 3 else 1
    return experts * FORMS[form].count_bytes(shape[-2], shape[-1])


class FrozenLinear(nn.Linear):
    """A projection whose matrix stays quantized: no more than one product has it in the dtype of its rows."""

    def __init__(self, stack: FrozenStack, bias: nn.Parameter | None) -> None:
        nn.Module.__init__(self)
        _, self.out_features, self.in_features = stack.shape
        self.stack, self.bias = stack, bias  # type: ignore[assignment]

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """The matrix, dequantized: for what asks for its shape, dtype and device, and for the norms of DoRA."""
        return self.stack.dequantize(slice(None))[0]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rows, stack = input.to(self.stack.dtype), self.stack
        return _FrozenProduct.apply(rows, self.bias, stack.form, stack.shape, *stack.parts).to(input.dtype)  # type: ignore[no-any-return]


def multiply(
    rows: torch.Tensor,
    form: str,
    parts: Sequence[torch.Tensor],
    shape: Sequence[int],
    transposed: bool,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Return x W^T + b, [..., R], of rows [..., C]; or, if transposed, x W, [..., C], of rows [..., R].

    form, parts, shape: of a stack of one matrix W.
    """
    (matrix,) = FORMS[form].dequantize(tuple(parts), (shape[1], shape[2]), rows.dtype)
    return linear(rows, matrix.t() if transposed else matrix, bias)


frozen_product = library.custom_op("layers::frozen_product", multiply, mutates_args=())


@frozen_product.register_fake
def _make_output(
    rows: torch.Tensor, form: str, parts: Any, shape: Sequence[int], transposed: bool, bias: torch.Tensor | None
) -> torch.Tensor:
    return rows.new_empty(*rows.shape[:-1], shape[2 if transposed else 1])


class _FrozenProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any,
        rows: torch.Tensor,
        bias: torch.Tensor | None,
        form: str,
        shape: Sequence[int],
        *parts: torch.Tensor,
    ) -> torch.Tensor:
        context.form, context.shape = form, shape
        context.save_for_backward(*parts)
        return frozen_product(rows, form, parts, shape, False, bias)  # type: ignore[no-any-return]

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        form, shape, parts = context.form, context.shape, context.saved_tensors
        rows = frozen_product(gradient, form, parts, shape, True, None)
        return rows, *(None,) * (3 + len(parts))
