"""Frozen experts that stay quantized: the stack of a layer, dequantized for each of its products, a chunk of experts at
a time, and the products of rows with it, plus products of low rank (LoRA, 2106.09685).

No stack is ever there whole in the dtype of the products. The host reads where the rows of each expert end, so it waits
for a GPU once per product; chunks whose experts have no row are not dequantized.

S rows, sorted by expert; E experts; r the rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import library

from models.experts.products import grouped_mm, multiply_groups
from models.layers.frozen import FrozenStack

CHUNK_NUMEL = 2**28  # numbers that are dequantized at once, at most, unless one expert has more


def count_chunk(shape: Sequence[int]) -> int:
    """Return the number of experts that are dequantized at once. shape: of the stack, [E, R, C]."""
    return min(shape[0], max(1, CHUNK_NUMEL // (shape[1] * shape[2])))


def multiply_in_chunks(
    rows: torch.Tensor,
    form: str,
    parts: Sequence[torch.Tensor],
    shape: Sequence[int],
    transposed: bool,
    factors: Sequence[torch.Tensor],
    offsets: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x W + x A B, [S, out], and the inner rows x A, [S, r], of rows [S, in].

    form, parts, shape: of the stack. transposed: W is each expert's matrix as it is kept; otherwise its transpose.
    factors: [E, r, in] and [E, r, out]; none without a product of low rank, and then r is 0. offsets: int32 [E], where
    each expert's rows end.
    """
    stack = FrozenStack(form, tuple(parts), torch.Size(shape), rows.dtype)
    ends = [0, *offsets.tolist()]
    chunks = [experts for experts in _list_chunks(shape) if ends[experts.start] < ends[experts.stop]]
    if len(chunks) == 1:
        return _multiply_chunk(rows, stack, chunks[0], transposed, factors, offsets[chunks[0]])
    outputs, inner = _make_outputs(rows, form, parts, shape, transposed, factors, offsets)
    for experts in chunks:
        run = slice(ends[experts.start], ends[experts.stop])
        outputs[run], inner[run] = _multiply_chunk(
            rows[run], stack, experts, transposed, factors, offsets[experts] - run.start
        )
    return outputs, inner


def _make_outputs(
    rows: torch.Tensor,
    form: str,
    parts: Sequence[torch.Tensor],
    shape: Sequence[int],
    transposed: bool,
    factors: Sequence[torch.Tensor],
    offsets: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    rank = factors[0].shape[1] if factors else 0
    return rows.new_empty(len(rows), shape[2 if transposed else 1]), rows.new_empty(len(rows), rank)


frozen_mm = library.custom_op("experts::frozen_mm", multiply_in_chunks, mutates_args=())
frozen_mm.register_fake(_make_outputs)


def _list_chunks(shape: Sequence[int]) -> Iterator[slice]:
    length = count_chunk(shape)
    for start in range(0, shape[0], length):
        yield slice(start, min(start + length, shape[0]))


def _multiply_chunk(
    rows: torch.Tensor,
    stack: FrozenStack,
    experts: slice,
    transposed: bool,
    factors: Sequence[torch.Tensor],
    offsets: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `frozen_mm` of the rows of a run of experts. The dequantized matrices are freed at the end, before those
    of the next chunk are made. factors: of all experts. offsets: of the run."""
    matrices = stack.dequantize(experts)
    outputs = multiply_groups(rows, matrices if transposed else matrices.transpose(1, 2), offsets)
    if not factors:
        return outputs, rows.new_empty(len(rows), 0)
    first, second = (factor[experts] for factor in factors)
    inner = multiply_groups(rows, first.transpose(1, 2), offsets)
    return outputs.add_(multiply_groups(inner, second, offsets)), inner


class _FrozenLinear(torch.autograd.Function):
    """The gradient of the rows is the same product, with the transposed matrices and the two factors exchanged."""

    @staticmethod
    def forward(
        context: Any,
        rows: torch.Tensor,
        first: torch.Tensor | None,
        second: torch.Tensor | None,
        offsets: torch.Tensor,
        source: torch.Tensor | None,
        tokens: torch.Tensor | None,
        transposed: bool,
        form: str,
        shape: Sequence[int],
        *parts: torch.Tensor,
    ) -> torch.Tensor:
        factors = [] if first is None or second is None else [first, second]
        outputs, inner = frozen_mm(rows, form, parts, shape, transposed, factors, offsets)
        context.transposed, context.form, context.shape = transposed, form, shape
        kept = (None, None) if not factors else (rows, None) if source is None else (source, tokens)
        context.save_for_backward(offsets, first, second, inner if factors else None, *kept, *parts)
        return outputs

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        offsets, first, second, inner, source, tokens, *parts = context.saved_tensors
        gradient, factors = gradient.contiguous(), [] if first is None else [second, first]
        row_gradients, inner_gradients = frozen_mm(
            gradient, context.form, parts, context.shape, not context.transposed, factors, offsets
        )
        others = (None,) * (7 + len(parts))
        if not factors:
            return row_gradients, None, None, *others
        rows = (source if tokens is None else source.index_select(0, tokens)).to(gradient.dtype)
        first_gradient = grouped_mm(inner_gradients.t(), rows, offsets)
        return row_gradients, first_gradient, grouped_mm(inner.t(), gradient, offsets), *others


def frozen_linear(
    rows: torch.Tensor,
    stack: FrozenStack,
    factors: tuple[torch.Tensor, torch.Tensor] | None,
    offsets: torch.Tensor,
    *,
    transposed: bool = False,
    source: torch.Tensor | None = None,
    tokens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute `adapted_linear`, or `grouped_linear` where `factors` is None, with experts that are kept quantized.
    Returns [S, out]."""
    if source is not None:
        source = source.detach()
    first, second = (None, None) if factors is None else (each.to(stack.dtype).contiguous() for each in factors)
    return _FrozenLinear.apply(  # type: ignore[no-any-return]
        rows.to(stack.dtype), first, second, offsets, source, tokens, transposed, stack.form, stack.shape, *stack.parts
    )
