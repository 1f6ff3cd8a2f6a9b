"""Gradients of weights that bypass autograd: deferred to a second half of the backward pass, or added where they are
summed.

A projection y = x W^T has two products in its backward pass: dx = dy W, which the stage before waits for, and
dW = dy^T x, which nobody waits for until the step (2401.10241). While a stage defers, its projections keep x and dy
instead of computing the second, and so do the products of stacked experts. All else that has weights (norms,
embeddings, routers, biases and adapters of experts, the head inside the loss) has its gradients in the first half.

In a whole backward pass with sums in fp32 and weights in 16 bits, a projection adds dW to its sum while it multiplies,
and an embedding adds the gradients of the rows that it looked up. Autograd would make a gradient of the weight's shape,
rounded to 16 bits, which is then read and added: of an embedding's rows, most are zero.

It is done in the projections, not by cutting autograd's graph, so a layer runs as often as without: with recomputation
once more, in the first half, which leaves the x that the second needs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from transformers.pytorch_utils import Conv1D

from models.experts.gate import list_gates
from models.experts.grouped import GROUPED, is_stack
from models.experts.products import GroupedProduct
from models.layers.decoder import Embedding
from models.losses.accumulate import add_product
from models.parallel.layers import RowParallelConv1D, RowParallelLinear
from models.parallel.sequence import ColumnParallelConv1D, ColumnParallelLinear
from models.sharding.tensor_parallel import list_partial_gradients

_ROW_PARALLEL = (RowParallelLinear, RowParallelConv1D)
_PROJECTIONS = (nn.Linear, Conv1D, ColumnParallelLinear, ColumnParallelConv1D, *_ROW_PARALLEL)


# Returns the sum of a parameter's gradients, of its shape, to add one to; None where autograd has to have the gradient
LendSum = Callable[[nn.Parameter], torch.Tensor | None]


def lend_none(parameter: nn.Parameter) -> None:
    """Return no sum: autograd gets the gradient."""


class Product(NamedTuple):
    """The gradient of one projection's weights, to be computed: x [..., inputs], dy [..., outputs]."""

    projection: SplitProjection
    x: torch.Tensor
    dy: torch.Tensor

    @property
    def weight(self) -> nn.Parameter:
        return self.projection.weight

    @property
    def kept(self) -> tuple[torch.Tensor, ...]:
        """The tensors that wait for it."""
        return self.x, self.dy

    def compute(self, lend_sum: LendSum) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the gradients of weight and bias; None for one that is not trained, and for a weight's that was added
        to the sum that `lend_sum` returned."""
        weight, weight_gradient = self.projection.weight, None
        if weight.requires_grad:
            total = lend_sum(weight)
            if total is None:
                weight_gradient = torch.mm(*self._factors())
            else:
                add_product(total, *self._factors())
        return weight_gradient, self._sum_for_bias()

    def add(self, lend_sum: LendSum) -> Iterator[nn.Parameter]:
        """Add the gradients to `.grad`, that of the weight to the sum that is lent for it, if one is, and yield each
        parameter that got one. The product is added as it is computed, which saves writing and reading a copy of the
        weights."""
        weight, bias = self.projection.weight, self.projection.bias
        if weight.requires_grad:
            total = lend_sum(weight) if weight.grad is None else weight.grad
            if total is None:
                weight.grad = torch.mm(*self._factors())
            else:
                add_product(total, *self._factors())
            yield weight
        if bias is not None and (bias_gradient := self._sum_for_bias()) is not None:
            bias.grad = bias_gradient if bias.grad is None else bias.grad.add_(bias_gradient)
            yield bias

    def _factors(self) -> tuple[torch.Tensor, torch.Tensor]:
        x, dy = self.x.flatten(0, -2), self.dy.flatten(0, -2)
        return (x.t(), dy) if self.projection.is_transposed else (dy.t(), x)

    def _sum_for_bias(self) -> torch.Tensor | None:
        bias = self.projection.bias
        return self.dy.flatten(0, -2).sum(dim=0) if bias is not None and bias.requires_grad else None


Deferred = Product | GroupedProduct


class DeferredGradients:
    """The gradients of weights of a stage's running backward pass. One for all its layers."""

    def __init__(self) -> None:
        self.products: list[Deferred] | None = None  # where those of the running pass go; None while none are put off
        self.lend_sum: LendSum = lend_none  # of the running pass

    @contextmanager
    def defer(self, splits: bool = True, lend_sum: LendSum = lend_none) -> Iterator[list[Deferred]]:
        """Defer the products of backward passes inside the context; yields them in their order. splits: False for a
        whole backward pass, which defers none. lend_sum: for gradients that are not deferred."""
        products: list[Deferred] = []
        self.products, self.lend_sum = products if splits else None, lend_sum
        try:
            yield products
        finally:
            self.products, self.lend_sum = None, lend_none


@torch.no_grad()
def compute_gradients(
    products: list[Deferred],
    arrived: Callable[[nn.Parameter], None],
    lend_sum: LendSum = lend_none,
) -> None:
    """Add the deferred products to the sums that `lend_sum` returns for their weights, where it returns none to
    `.grad`, and call `arrived` for each parameter that got one, once the last of its products is added: a projection
    that runs once per batch of documents has several. Each product is freed once it is computed."""
    products.reverse()
    left = Counter(id(product.weight) for product in products)
    while products:
        product = products.pop()
        left[id(product.weight)] -= 1
        for parameter in product.add(lend_sum):
            if not left[id(product.weight)]:
                arrived(parameter)


class SplitProjection:
    """A projection's product, in place of `F.linear`: the same numbers, and gradients that can be put off.

    is_transposed: the weight is [inputs, outputs].
    """

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, is_transposed: bool, deferred: DeferredGradients
    ) -> None:
        self.weight, self.bias, self.is_transposed, self.deferred = weight, bias, is_transposed, deferred

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return _Multiply.apply(x, self.weight, self.bias, self)


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, split: SplitProjection
    ) -> torch.Tensor:
        context.save_for_backward(x)
        context.split = split
        return nn.functional.linear(x, weight.t() if split.is_transposed else weight, bias)

    @staticmethod
    @once_differentiable
    def backward(context: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        split, (x,) = context.split, context.saved_tensors
        product, grad_x = Product(split, x, dy), None
        if context.needs_input_grad[0]:
            grad_x = dy @ (split.weight.t() if split.is_transposed else split.weight)
        if split.deferred.products is None:
            return grad_x, *product.compute(split.deferred.lend_sum), None
        split.deferred.products.append(product)
        return grad_x, None, None, None


class EmbeddingLookup:
    """An embedding's lookup, in place of `F.embedding`: the same rows, and gradients of the rows alone."""

    def __init__(self, embedding: Embedding, deferred: DeferredGradients) -> None:
        self.embedding, self.deferred = embedding, deferred

    def __call__(self, input_ids: torch.Tensor) -> torch.Tensor:
        return _LookUp.apply(input_ids, self.embedding.weight, self)  # type: ignore[no-any-return]


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, input_ids: torch.Tensor, weight: torch.Tensor, lookup: EmbeddingLookup) -> torch.Tensor:
        context.save_for_backward(input_ids)
        context.lookup = lookup
        return nn.functional.embedding(input_ids, weight)

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (input_ids,), embedding = context.saved_tensors, context.lookup.embedding
        padding = -1 if embedding.padding_idx is None else embedding.padding_idx
        total = context.lookup.deferred.lend_sum(embedding.weight)
        if total is None:
            rows = embedding.num_embeddings
            return None, torch.ops.aten.embedding_dense_backward(gradient, input_ids, rows, padding, False), None
        rows = gradient.to(total.dtype).masked_fill_((input_ids == padding).unsqueeze(-1), 0)
        total.index_put_((input_ids.flatten(),), rows.flatten(0, -2), accumulate=True)  # sorted on a GPU: repeatable
        return None, None, None


def add_rows(module: nn.Module, deferred: DeferredGradients) -> None:
    """Have a trained embedding add the gradients of its rows to the sum that is lent; other layers stay as they are."""
    if isinstance(module, Embedding) and module.weight.requires_grad and module.is_plain:
        module.lookup = EmbeddingLookup(module, deferred)


def split_projections(module: nn.Module, deferred: DeferredGradients, defers: bool = True) -> tuple[int, int]:
    """Make the trained projections and experts of a layer able to defer their gradients, or to add them to lent sums.

    Not those whose gradients the ranks that share the layer sum (a hook does, when autograd has made them), and not
    modules of other classes, which may do more than a product. defers: whether the schedule puts gradients off. If not,
    projections that keep this rank's part of a gathered input alone (`models/parallel/sequence.py`) stay as they are:
    made able to, they would keep all of it. Returns the number of elements in trained matrices whose gradients can be
    deferred, and in all of them.
    """
    for _, part in _list_projections(module, defers):
        plain = not isinstance(part, _ROW_PARALLEL)
        # A sharded projection adds its bias after the sum over the ranks.
        split = SplitProjection(part.weight, part.bias if plain else None, isinstance(part, Conv1D), deferred)
        if plain:
            part.forward = split
        else:
            part.multiply = split
    for _, part in _list_stacks(module):
        part.deferral = deferred
    can = sum(parameter.numel() for _, parameter in list_deferred(module) if parameter.ndim > 1)
    return can, sum(p.numel() for p in module.parameters() if p.requires_grad and p.ndim > 1)


def list_deferred(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield name and parameter of a layer's module where gradients can be deferred."""
    for name, part in _list_projections(module):
        yield f"{name}.weight", part.weight
        if part.bias is not None and part.bias.requires_grad and not isinstance(part, _ROW_PARALLEL):
            yield f"{name}.bias", part.bias
    for name, part in _list_stacks(module):
        for own, parameter in part.named_parameters(name, recurse=False):
            if parameter.requires_grad and not own.endswith("bias"):
                yield own, parameter


def list_lent(module: nn.Module, projections: bool, defers: bool) -> Iterator[str]:
    """Yield the names of weights whose gradients are added to a sum that is lent, on a GPU without being made first:
    those of a plain embedding and, where `projections` are split, of these. defers: as in `split_projections`."""
    if isinstance(module, Embedding) and module.is_plain:
        yield "weight"
    if projections:
        yield from (f"{name}.weight" for name, _ in _list_projections(module, defers))


def _list_projections(module: nn.Module, defers: bool = True) -> Iterator[tuple[str, Any]]:
    summed, gates = list_partial_gradients(module), {id(gate) for gate in list_gates(module)}
    for name, part in module.named_modules():
        if id(part) in gates:
            continue
        own = {f"{name}.weight"} if isinstance(part, _ROW_PARALLEL) else {f"{name}.weight", f"{name}.bias"}
        splits = type(part) in _PROJECTIONS and (defers or getattr(part, "entry", None) is None)
        if splits and part.weight.requires_grad and not own & summed:
            yield name, part


def _list_stacks(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The stacked experts that are multiplied as grouped products alone."""
    summed = list_partial_gradients(module)
    for name, part in module.named_modules():
        if not is_stack(part) or hasattr(part, "low_rank"):
            continue
        own = {own for own, _ in part.named_parameters(name, recurse=False)}
        if not own & summed and part.config._experts_implementation == GROUPED:  # type: ignore[union-attr]
            yield name, part
