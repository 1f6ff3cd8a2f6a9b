"""LoRA with its product added into the projection's output: peft's numbers, with fewer tensors as large as it."""

from __future__ import annotations

import copy
from typing import Any

import peft
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from models.adapters.fused import fuse_products

ROWS, INPUTS, OUTPUTS, RANK = 24, 40, 56, 4


class LargeTensors(TorchDispatchMode):
    """Elements that operators read and write of tensors as large as an output [rows, outputs]."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if not function.is_view:
            tensors = [leaf for leaf in tree_leaves((args, result)) if isinstance(leaf, torch.Tensor)]
            self.elements += sum(tensor.numel() for tensor in tensors if tensor.numel() == ROWS * OUTPUTS)
        return result


def make_pair(dtype: torch.dtype = torch.float32, **options: Any) -> tuple[nn.Module, nn.Module]:
    """One projection with an adapter, as peft runs it and fused, with the same weights."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(INPUTS, OUTPUTS, bias=options.pop("bias", False)))
    config = peft.LoraConfig(r=RANK, lora_alpha=12, target_modules=["0"], init_lora_weights=False, **options)
    plain = peft.inject_adapter_in_model(config, module).to(dtype)
    fused = copy.deepcopy(plain)
    fuse_products(fused)
    return plain, fused


def run(module: nn.Module, x: torch.Tensor, gradient: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor], int]:
    """The output, all gradients, and the elements of large tensors that both passes touched."""
    inputs = x.clone().requires_grad_()
    with LargeTensors() as large:
        output = module(inputs)
        output.backward(gradient)
    trained = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    assert inputs.grad is not None
    return output.detach(), [inputs.grad, *trained], large.elements


@pytest.mark.parametrize("options", [{}, {"bias": True}, {"use_rslora": True}, {"use_dora": True}])
def test_output_and_gradients_are_those_of_peft(options: dict[str, Any]) -> None:
    plain, fused = make_pair(torch.float64, **options)
    x, gradient = torch.randn(2, ROWS // 2, INPUTS).double(), torch.randn(2, ROWS // 2, OUTPUTS).double()
    expected, actual = run(plain, x, gradient), run(fused, x, gradient)
    torch.testing.assert_close(actual[0], expected[0], rtol=1e-12, atol=1e-12)
    assert len(actual[1]) == len(expected[1]) >= 3
    for ours, theirs in zip(actual[1], expected[1], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_in_bf16_it_is_nearer_to_fp32() -> None:
    """The output, which is rounded once less. Gradients are rounded as often as peft's: those of the inputs, A and B
    are as near."""
    plain, fused = make_pair(torch.bfloat16)
    x, gradient = torch.randn(ROWS, INPUTS).bfloat16(), torch.randn(ROWS, OUTPUTS).bfloat16()
    exact, theirs, ours = (
        [output, *gradients]
        for output, gradients, _ in (
            run(copy.deepcopy(plain).float(), x.float(), gradient.float()),
            run(plain, x, gradient),
            run(fused, x, gradient),
        )
    )
    assert measure_errors(ours[:1], exact[:1]) < measure_errors(theirs[:1], exact[:1])
    assert len(ours) == 4
    most = torch.finfo(torch.bfloat16).eps / 2  # that one rounding may change a number by
    assert max(measure_errors(ours, exact)) < most and max(measure_errors(theirs, exact)) < most


def measure_errors(found: list[torch.Tensor], exact: list[torch.Tensor]) -> list[float]:
    """Return the norm of each tensor's error relative to its own."""
    return [((ours - right).norm() / right.norm()).item() for ours, right in zip(found, exact, strict=True)]


def test_an_adapter_costs_less_than_half_of_the_traffic_of_outputs() -> None:
    plain, fused = make_pair()
    base = copy.deepcopy(plain)
    base[0].enable_adapters(False)
    x, gradient = torch.randn(ROWS, INPUTS), torch.randn(ROWS, OUTPUTS)
    alone, theirs, ours = (run(module, x, gradient)[2] for module in (base, plain, fused))
    # The sum reads and writes an output, and two products of the backward pass read its gradient. peft's also writes
    # B's output, scales it, and scales its gradient.
    assert ours - alone == 4 * ROWS * OUTPUTS
    assert ours - alone < (theirs - alone) / 2


def test_disabled_and_merged_adapters_are_left_to_peft() -> None:
    plain, fused = make_pair()
    x = torch.randn(ROWS, INPUTS)
    for change in (lambda layer: layer.enable_adapters(False), lambda layer: layer.merge()):
        for module in (plain, fused):
            change(module[0])
        assert torch.equal(fused(x), plain(x))
