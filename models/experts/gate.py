"""The precision of a router's gate: the product of its tokens with its weights, which decides which experts they go to.

In a model of 16 bits most routers of `transformers` (5.23) round that product, their logits, to 16 bits; some cast both
operands first and have it in fp32. With `moe.router_dtype=fp32` all of them have it in fp32, and the operands stay as
they are: a product of 16 bits by 16 bits is exact in fp32, so that only sums are rounded.

The product is taken out of a router's own forward pass, whatever else that does: while it runs, its one call of
`torch.nn.functional.linear` is answered here (`_GateMode`), for a parameter of the router, an `nn.Linear` within it and
a router that is one alike. A family whose routers do not make exactly one is refused (`check_router_dtype`). The
products of an adapter on that `nn.Linear` are answered too, and are not counted.

N tokens, K experts a token, E experts, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from transformers import PretrainedConfig

from errors import UserError
from models.experts.router import find_router
from models.experts.sizes import count_experts
from models.layers.context import MicroBatchContext
from models.layers.decoder import PipelineDecoderLayer
from models.layers.layer import Layer
from models.losses.accumulate import add_product

_HALVES = (torch.bfloat16, torch.float16)
# Whose `mm` takes factors of 16 bits and returns fp32 (torch 2.13: no kernel for a CPU); a plan counts that on meta
_DEVICES = ("cuda", "meta")
_CASTS = (torch.Tensor.to, torch.Tensor.type, torch.Tensor.float)


class Lender(Protocol):
    """Where gradients are summed. lend_sum: returns the sum of a parameter's gradients, to add one to; None where
    autograd has to have the gradient."""

    lend_sum: Callable[[nn.Parameter], torch.Tensor | None]


def multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return x weight^T + bias in fp32, without a derivative. x: [..., D], weight: [E, D], bias: [E]."""
    if x.device.type in _DEVICES and x.dtype is weight.dtype and x.dtype in _HALVES:
        logits = torch.mm(x.flatten(0, -2), weight.t(), out_dtype=torch.float32).view(*x.shape[:-1], -1)
        return logits if bias is None else logits + bias
    return linear(x.float(), weight.float(), None if bias is None else bias.float())


class _Multiply(torch.autograd.Function):
    """`multiply`, with the gradients of its operands: products in fp32 too. Those of parameters are added unrounded to
    the sums that are lent for them."""

    @staticmethod
    def forward(
        context: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, lender: Lender | None
    ) -> torch.Tensor:
        context.weight, context.bias = (each if isinstance(each, nn.Parameter) else None for each in (weight, bias))
        context.lender, context.dtypes = lender, (weight.dtype, None if bias is None else bias.dtype)
        context.save_for_backward(x if weight.requires_grad else None, weight)  # an adapter's is not the parameter
        context.x_dtype = x.dtype
        return multiply(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = context.saved_tensors
        grad_x = grad_weight = grad_bias = None
        if context.needs_input_grad[0]:
            grad_x = (gradient @ weight.to(gradient.dtype)).to(context.x_dtype)
        rows = gradient.flatten(0, -2)
        if context.needs_input_grad[1]:
            factors = rows.t(), x.flatten(0, -2).to(rows.dtype)
            total = _borrow(context.lender, context.weight)
            if total is None:
                grad_weight = torch.mm(*factors).to(context.dtypes[0])
            else:
                add_product(total, *factors)
        if context.needs_input_grad[2]:
            total = _borrow(context.lender, context.bias)
            if total is None:
                grad_bias = rows.sum(dim=0).to(context.dtypes[1])
            else:
                total.add_(rows.sum(dim=0))
        return grad_x, grad_weight, grad_bias, None


def _borrow(lender: Lender | None, parameter: nn.Parameter | None) -> torch.Tensor | None:
    return None if lender is None or parameter is None else lender.lend_sum(parameter)


# Returns the result of a gate's product, of x, weight and bias, that the router continues with. The last argument is
# the dtype of the operands that the router has multiplied, which it may have cast.
Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.dtype], torch.Tensor]


class _GateMode(TorchFunctionMode):
    """While this is on, `product` answers each `linear`, and gets its operands as they were before casts to fp32.
    adapters: weights of adapters, whose products are those of no gate."""

    def __init__(self, product: Product, adapters: Sequence[torch.Tensor] = ()) -> None:
        super().__init__()
        self.num_products = self.num_gates = 0
        self._product, self._adapters = product, adapters
        self._casts: list[tuple[torch.Tensor, torch.Tensor]] = []  # (result, operand)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is linear:
            self.num_products += 1
            return self._answer(*args, **kwargs)
        result = function(*args, **kwargs)
        if function in _CASTS and args[0].dtype in _HALVES and result.dtype is torch.float32:
            self._casts.append((result, args[0]))
        return result

    def _answer(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        x, weight = self._find_operand(input), self._find_operand(weight)
        self.num_gates += not any(weight is each for each in self._adapters)
        return self._product(x, weight, None if bias is None else self._find_operand(bias), input.dtype)

    def _find_operand(self, tensor: torch.Tensor) -> torch.Tensor:
        for result, operand in self._casts:
            if result is tensor:
                return operand
        return tensor


@dataclass
class Comparison:
    """Whether routers also choose with the other precision, in the running step: one object for all of a stage."""

    is_on: bool = False


@dataclass(frozen=True)
class ChoiceCounter:
    """Counts the tokens of one layer that would choose other experts in the other precision. count: int64, a scalar."""

    context: MicroBatchContext
    comparison: Comparison
    count: torch.Tensor

    def is_on(self) -> bool:
        """Returns whether to count in this pass: one of training that is not a recomputation."""
        return self.comparison.is_on and torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1

    def add(self, chosen: torch.Tensor, others: torch.Tensor) -> None:
        """chosen, others: int64 [N, K], in any order."""
        assert self.context.tokens is not None
        differ = (chosen.sort(dim=-1).values != others.sort(dim=-1).values).any(dim=-1)
        self.count.add_((differ & self.context.tokens.is_real.bool()).sum())


@dataclass
class RouterForward:
    """A router's forward pass, in place of that of its class.

    dtype: of the stage, 16 bits. in_fp32: whether the gate's product is in fp32, not as `transformers` computes it.
    lender: for gradients of its parameters; None where autograd has to have them. choices: None without a count.
    adapters: the weights of adapters on projections within it.
    """

    router: nn.Module
    dtype: torch.dtype
    in_fp32: bool
    lender: Lender | None = None
    choices: ChoiceCounter | None = field(default=None, init=False)
    adapters: list[nn.Parameter] = field(init=False)

    def __post_init__(self) -> None:
        self.adapters = [parameter for name, parameter in self.router.named_parameters() if "lora_" in name]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.choices is not None and self.choices.is_on():
            return self._run_and_compare(self.choices, args, kwargs)
        return self._run(self._multiply, args, kwargs)[0] if self.in_fp32 else self._forward(args, kwargs)

    def _forward(self, args: Any, kwargs: Any) -> Any:
        return type(self.router).forward(self.router, *args, **kwargs)

    def _run(self, product: Product, args: Any, kwargs: Any) -> tuple[Any, bool]:
        """Return the router's outputs, and whether they follow from one product."""
        with _GateMode(product, self.adapters) as mode:
            outputs = self._forward(args, kwargs)
        if self.in_fp32 and mode.num_gates != 1:  # the logits may have been rounded
            raise RuntimeError(f"{type(self.router).__name__} made {mode.num_gates} products, not one")
        return outputs, mode.num_products == 1

    def _multiply(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        if self.in_fp32:
            return _Multiply.apply(x, weight, bias, self.lender)  # type: ignore[no-any-return]
        return linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))

    def _run_and_compare(self, choices: ChoiceCounter, args: Any, kwargs: Any) -> Any:
        others: list[torch.Tensor] = []

        def take(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
            logits = self._multiply(x, weight, bias, dtype)
            with torch.no_grad(), _disable_current_modes():  # what `selective` keeps is kept by its order
                if logits.dtype is torch.float32:
                    others.append(logits.to(self.dtype).to(dtype))
                else:
                    others.append(multiply(x, weight, bias))
            return logits

        outputs, is_one = self._run(take, args, kwargs)
        if not is_one:
            self.choices = None
            return outputs
        with torch.no_grad(), _disable_current_modes():
            other_outputs, _ = self._run(lambda *_: others[0], args, kwargs)
            choices.add(outputs[2], other_outputs[2])
        return outputs


def replace_forward(
    layer: nn.Module, dtype: torch.dtype, in_fp32: bool, lender: Lender | None, summed: set[str]
) -> None:
    """Replace the forward pass of the layer's router, if it has one. dtype, in_fp32, lender: as in `RouterForward`.
    summed: the names of parameters whose gradients ranks sum when autograd has made them."""
    found = find_router(layer)
    if found is None:
        return
    own = {id(parameter) for parameter in found[1].parameters()}
    is_summed = any(id(parameter) in own for name, parameter in layer.named_parameters() if name in summed)
    found[1].forward = RouterForward(found[1], dtype, in_fp32, None if is_summed else lender)


def find_forward(router: nn.Module) -> RouterForward | None:
    """Return what has replaced a router's forward pass; None for one that has its own."""
    forward = vars(router).get("forward")
    return forward if isinstance(forward, RouterForward) else None


def list_gates(layer: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of routers whose product is in fp32."""
    for module in layer.modules():
        forward = find_forward(module)
        if forward is not None and forward.in_fp32:
            yield from module.modules()


def can_compare(router: nn.Module) -> bool:
    """Return whether a router may run twice, once in each precision: not one that draws random numbers, of which a
    second run would take those of what follows."""
    return not any("jitter" in name for module in router.modules() for name in vars(module))


def check_router_dtype(config: PretrainedConfig, layers: Sequence[Layer]) -> None:
    """Raises UserError for a model without experts, and for one with a router whose gate is not one product."""
    if count_experts(config) == (1, 1):
        raise UserError(f"moe.router_dtype=fp32: this '{config.model_type}' model has no experts; leave it at null")
    modules = [layer.build_on_meta() for layer in layers if issubclass(layer.module_class, PipelineDecoderLayer)]
    found = list(filter(None, map(find_router, modules)))
    unknown = next((router for parent, router in found if count_products(parent, router) != 1), None)
    if not found or unknown is not None:
        what = "no layer has a router" if unknown is None else f"{type(unknown).__name__} does not make one product"
        raise UserError(
            f"moe.router_dtype=fp32: where the routers of '{config.model_type}' compute their logits is not known "
            f"({what}); leave it at null"
        )


class _RouterHasRun(Exception):
    """Ends the forward pass of a block once its router has run."""


def count_products(parent: nn.Module, router: nn.Module) -> int:
    """Return the number of products that a router on the meta device makes of its inputs; 0 where it cannot be run.
    parent: the block that has the router, and that passes some of them more than hidden states."""
    width = next((parameter.shape[1] for parameter in router.parameters() if parameter.ndim == 2), 1)
    inputs = torch.empty(1, 2, width, device="meta")
    attempts = (router, inputs), (router, inputs[0]), (parent, inputs)
    return next(filter(None, (_count_in(module, router, given) for module, given in attempts)), 0)


def _count_in(module: nn.Module, router: nn.Module, inputs: torch.Tensor) -> int:
    def stop(*_: Any) -> None:
        raise _RouterHasRun

    hook = router.register_forward_hook(stop)
    try:
        with torch.no_grad(), _GateMode(lambda x, weight, bias, _: linear(x, weight, bias)) as mode:
            module(inputs)
    except _RouterHasRun:
        return mode.num_products
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError, NotImplementedError):
        pass  # it takes other inputs, or reads values
    finally:
        hook.remove()
    return 0
