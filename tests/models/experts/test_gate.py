"""Routers with logits in fp32, and the tokens that would choose other experts in the other precision, against copies of
them in fp32 and plain loops."""

from __future__ import annotations

from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.families import build_family, build_family_config
from torch import nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from errors import UserError
from models.architecture.lookup import build_layers
from models.experts import gate
from models.experts.gate import (
    ChoiceCounter,
    Comparison,
    RouterForward,
    check_router_dtype,
    count_products,
    find_forward,
    list_gates,
    replace_forward,
)
from models.experts.router import find_router
from models.families.llama4_text import MoE

HALF = torch.bfloat16
FAMILIES = ("qwen3_moe", "gpt_oss", "deepseek_v3", "llama4_text", "minimax_m2")
NUM_TOKENS = 400


class Sums:
    """Sums in fp32 of a router's gradients."""

    def __init__(self) -> None:
        self.totals: dict[int, torch.Tensor] = {}

    def lend_sum(self, parameter: nn.Parameter) -> torch.Tensor:
        return self.totals.setdefault(id(parameter), torch.zeros(parameter.shape))


def build_block(family: str, spread: float = 1.0) -> tuple[nn.Module, nn.Module]:
    """A block with experts and its router, in bf16. spread: of the experts' weights, to what they have in common; small
    biases of the choice leave that to the logits."""
    torch.manual_seed(0)
    found = find_router(build_family(family).model.layers[-1].to(HALF))
    assert found is not None
    with torch.no_grad():
        for parameter in found[1].parameters():
            parameter.copy_((torch.randn(parameter.shape[1:]) + spread * torch.randn(parameter.shape)) / 8)
        for name, buffer in found[0].named_buffers():
            buffer.mul_(1e-3 if name.endswith("e_score_correction_bias") else 1)
    return found


def list_arguments(parent: nn.Module, family: str) -> tuple[torch.Tensor, ...]:
    return (parent.e_score_correction_bias,) if family == "minimax_m2" else ()


def draw_inputs(router: nn.Module) -> torch.Tensor:
    width = next(each for each in router.parameters() if each.ndim == 2).shape[1]
    return torch.randn(NUM_TOKENS, width, generator=torch.Generator().manual_seed(1)).to(HALF).requires_grad_()


def run(router: nn.Module, x: torch.Tensor, *arguments: torch.Tensor) -> Any:
    """Returns the outputs, and those gradients of the inputs and parameters that autograd makes."""
    outputs = router(x, *arguments)
    leaves = [x, *router.parameters()]
    factor = torch.linspace(-1, 1, outputs[0].numel()).view_as(outputs[0])
    gradients = torch.autograd.grad((outputs[0].float() * factor).sum(), leaves, allow_unused=True)
    return outputs, gradients


@pytest.mark.parametrize("lends", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_router_in_bf16_is_its_copy_in_fp32(family: str, lends: bool) -> None:
    """Logits and choices; gradients too, rounded where autograd has them and unrounded where sums are lent."""
    parent, router = build_block(family)
    arguments, x, sums = list_arguments(parent, family), draw_inputs(router), Sums()
    exact = deepcopy(router).float()
    expected, wanted = run(exact, x.detach().float().requires_grad_(), *(each.float() for each in arguments))
    replace_forward(parent, HALF, True, sums if lends else None, set())
    outputs, found = run(router, x, *arguments)
    logits = expected[1] if family == "llama4_text" else expected[0]  # transformers' returns scores first
    if family != "llama4_text":
        assert outputs[0].dtype is torch.float32
        torch.testing.assert_close(outputs[0], logits, rtol=1e-6, atol=1e-6)
        assert torch.equal(outputs[2], expected[2]) and len(outputs[2].unique()) > 2
        torch.testing.assert_close(outputs[1].float(), expected[1], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found[0], wanted[0].to(HALF), rtol=2**-7, atol=1e-5)
    for parameter, gradient, exact_gradient in zip(router.parameters(), found[1:], wanted[1:], strict=True):
        if lends:
            assert gradient is None
            torch.testing.assert_close(sums.totals[id(parameter)], exact_gradient, rtol=1e-5, atol=1e-5)
            assert not torch.equal(exact_gradient, exact_gradient.to(HALF).float())
        else:
            torch.testing.assert_close(gradient, exact_gradient.to(HALF), rtol=2**-7, atol=1e-5)


def test_the_operator_of_a_gpu_gets_the_operands_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """deepseek_v3 casts both to fp32 first."""
    seen, mm = [], torch.mm

    def multiply(left: torch.Tensor, right: torch.Tensor, *, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        if out_dtype is None:
            return mm(left, right)
        seen.append((left.dtype, right.dtype, out_dtype))
        return mm(left.to(out_dtype), right.to(out_dtype))

    for family in ("qwen3_moe", "gpt_oss", "deepseek_v3"):
        parent, router = build_block(family)
        replace_forward(parent, HALF, True, None, set())
        x = draw_inputs(router)
        expected, wanted = run(router, x)
        with monkeypatch.context() as patch:
            patch.setattr(gate, "_DEVICES", ("cpu",))
            patch.setattr(torch, "mm", multiply)
            found, gradients = run(router, x)
        torch.testing.assert_close(found[0], expected[0], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(gradients, wanted)
    assert seen == [(HALF, HALF, torch.float32)] * 3


def test_frozen_gates_keep_no_inputs() -> None:
    parent, router = build_block("qwen3_moe")
    replace_forward(parent, HALF, True, Sums(), set())
    router.requires_grad_(False)
    x = draw_inputs(router)
    logits = router(x)[0]
    assert [each is None for each in logits.grad_fn.saved_tensors] == [True, False]
    (gradient,) = torch.autograd.grad(logits.sum(), x)
    expected = router.weight.float().sum(dim=0).to(HALF).expand_as(x)
    torch.testing.assert_close(gradient, expected, rtol=2**-7, atol=1e-5)


def test_gradients_that_ranks_sum_are_autograds() -> None:
    parent, router = build_block("gpt_oss")
    replace_forward(parent, HALF, True, Sums(), {"router.weight"})
    assert find_forward(router).lender is None  # type: ignore[union-attr]
    assert set(map(id, list_gates(parent))) == {id(router)}


class Recomputed(nn.Module):
    def __init__(self, router: nn.Module) -> None:
        super().__init__()
        self.router = router

    def forward(self, *inputs: torch.Tensor) -> Any:
        return checkpoint(self.router, *inputs, use_reentrant=False)


def count_by_loop(router: nn.Module, x: torch.Tensor, real: torch.Tensor, *arguments: torch.Tensor) -> int:
    """Tokens that two copies of the router send elsewhere: one with logits in fp32, one with the same in bf16."""
    exact = deepcopy(router).float()
    logits = linear(x.detach().float(), exact.weight, getattr(exact, "bias", None))
    moved = 0
    for token, is_real in enumerate(real.tolist()):
        chosen = []
        for row in (logits[token], logits[token].to(HALF).float()):
            exact.weight = nn.Parameter(row.unsqueeze(1))  # of an input of 1 these are the logits
            exact.hidden_dim = 1
            if getattr(exact, "bias", None) is not None:
                exact.bias = nn.Parameter(torch.zeros_like(exact.bias))
            chosen.append(set(exact(torch.ones(1, 1), *(each.float() for each in arguments))[2].flatten().tolist()))
        moved += is_real and chosen[0] != chosen[1]
    return moved


def test_llama_4_scales_its_inputs_in_bf16() -> None:
    """By weights in fp32; its experts take what its layers have."""
    torch.manual_seed(0)
    block = MoE(build_family_config("llama4_text")).to(HALF)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.copy_(torch.randn(parameter.shape) / 8)
    exact, x = deepcopy(block).float(), torch.randn(2, 3, block.hidden_dim).to(HALF)
    replace_forward(block, HALF, True, None, set())
    outputs, logits = block(x)
    expected, exact_logits = exact(x.float())
    assert outputs.dtype is HALF
    torch.testing.assert_close(logits, exact_logits, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(outputs.float(), expected.view_as(outputs), rtol=0.05, atol=0.02)


@pytest.mark.parametrize("in_fp32", [True, False])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3", "minimax_m2"])
def test_other_choices_are_those_of_a_plain_loop(family: str, in_fp32: bool) -> None:
    """Without padding, and once, although the layer is recomputed; where logits are so close that rounding decides."""
    parent, router = build_block(family, spread=0.1)
    arguments, x = list_arguments(parent, family), draw_inputs(router)
    real = torch.arange(NUM_TOKENS) % 5 > 0
    expected = count_by_loop(router, x, real, *arguments)
    count, comparison = torch.zeros((), dtype=torch.int64), Comparison()
    replace_forward(parent, HALF, in_fp32, None, set())
    context: Any = SimpleNamespace(tokens=SimpleNamespace(is_real=real))
    forward = find_forward(router)
    assert forward is not None
    plain = run(router, x, *arguments)
    forward.choices = ChoiceCounter(context, comparison, count)
    router(x, *arguments)
    assert count == 0
    comparison.is_on = True
    with torch.no_grad():
        router(x, *arguments)  # an evaluation
    assert count == 0
    outputs, gradients = run(Recomputed(router), x, *arguments)
    assert count == expected and 3 < expected < NUM_TOKENS / 2
    assert all(torch.equal(own, other) for own, other in zip(outputs, plain[0], strict=True))
    assert all(torch.equal(own, other) for own, other in zip(gradients, plain[1], strict=True))


def test_a_router_that_makes_two_products_is_refused() -> None:
    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x))

    router = Router().to("meta")
    assert count_products(router, router) == 2
    forward = RouterForward(Router().to(HALF), HALF, True)
    with pytest.raises(RuntimeError, match="Router made 2 products, not one"):
        forward(torch.randn(2, 8, dtype=HALF))


@pytest.mark.parametrize("in_fp32", [True, False])
def test_an_adapter_on_a_projection_within_a_router(in_fp32: bool) -> None:
    """As `all-linear` puts on AFMoE's: two products more, and nothing to compare."""
    from peft import LoraConfig, inject_adapter_in_model

    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(8, 4, bias=False)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            logits = self.gate(x)
            return logits, *logits.topk(2)

    torch.manual_seed(0)
    options = LoraConfig(r=2, target_modules=["gate"], init_lora_weights=False)
    block = nn.ModuleDict({"experts": nn.Identity(), "router": Router()})
    inject_adapter_in_model(options, block)
    router, x = block["router"], torch.randn(400, 8).to(HALF)
    exact = deepcopy(router).to(HALF).float()
    replace_forward(block.to(HALF), HALF, in_fp32, None, set())
    forward, is_real = find_forward(router), torch.ones(400)
    assert forward is not None
    context: Any = SimpleNamespace(tokens=SimpleNamespace(is_real=is_real))
    forward.choices = ChoiceCounter(context, Comparison(is_on=True), torch.zeros((), dtype=torch.int64))
    results = []
    for each, inputs in ((router, x), (exact, x.float())):
        trained = [parameter for parameter in each.parameters() if parameter.requires_grad]
        logits = each(inputs)[0]
        results.append((logits, *torch.autograd.grad(logits.square().sum(), trained)))
    assert len(results[0]) == 3 and results[0][0].dtype is (torch.float32 if in_fp32 else HALF)
    tolerance = 1e-5 if in_fp32 else 0.05
    torch.testing.assert_close(results[0][0].float(), results[1][0], rtol=tolerance, atol=tolerance)
    for own, exact_one in zip(results[0][1:], results[1][1:], strict=True):
        torch.testing.assert_close(own.float(), exact_one, rtol=0.05, atol=0.02 * exact_one.abs().max().item())
    assert forward.choices is None


def test_families_whose_gates_are_not_found_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = build_family_config("mixtral")
    layers = build_layers(config)
    check_router_dtype(config, layers)
    dense = build_family_config("llama")
    with pytest.raises(UserError, match="this 'llama' model has no experts; leave it at null"):
        check_router_dtype(dense, build_layers(dense))
    router = type(layers[-3].build_on_meta().mlp.gate)
    monkeypatch.setattr(router, "forward", lambda self, x: (x @ self.weight.t(), x, x))
    with pytest.raises(UserError, match=r"of 'mixtral' compute their logits is not known \(MixtralTopKRouter does not"):
        check_router_dtype(config, layers)


def test_an_adapter_on_a_gate_is_trained() -> None:
    """peft makes the weights anew from A and B, which get the gradient of the product in fp32."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    options = LoraConfig(r=2, target_modules=[], target_parameters=["mlp.gate.weight"], init_lora_weights=False)
    model = get_peft_model(build_family("qwen3_moe"), options).to(HALF)
    layer = model.base_model.model.model.layers[-1]
    found = find_router(layer)
    assert found is not None
    exact, x = deepcopy(found[1]).float(), torch.randn(5, model.config.hidden_size).to(HALF)
    replace_forward(layer, HALF, True, Sums(), set())
    results = []
    for router, inputs in ((found[1], x), (exact, x.float())):
        trained = [parameter for parameter in router.parameters() if parameter.requires_grad]
        logits = router(inputs)[0]
        results.append((logits, torch.autograd.grad(logits.square().sum(), trained)))
    assert results[0][0].dtype is torch.float32 and len(results[0][1]) == 2
    for own, exact_one in zip((results[0][0], *results[0][1]), (results[1][0], *results[1][1]), strict=True):
        torch.testing.assert_close(own.float(), exact_one, rtol=0.05, atol=0.02 * exact_one.abs().max().item())
