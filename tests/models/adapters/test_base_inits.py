"""PiSSA and OLoRA against peft, which changes the base weights for them: the same numbers with those left alone."""

from __future__ import annotations

import copy
from typing import Any

import peft
import pytest
import torch
from torch import nn

from errors import UserError
from models.adapters.adapter import adapter_names, adapter_off, fill_adapter
from models.adapters.base_inits import describe_saved, join_starts, restore_starts, start_from_base
from models.adapters.folder import ADAPTER_NAME
from models.adapters.fused import fuse_products

ROWS, INPUTS, OUTPUTS, RANK = 24, 40, 56, 4
INITS = ["pissa", "pissa_niter_4", "olora"]


def make_base(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(INPUTS, OUTPUTS)).to(dtype)


def make_config(init: Any, **options: Any) -> peft.LoraConfig:
    return peft.LoraConfig(**{"r": RANK, "lora_alpha": 12, "target_modules": ["0"], **options}, init_lora_weights=init)


def inject(base: nn.Module, config: peft.LoraConfig) -> nn.Module:
    module = peft.inject_adapter_in_model(config, copy.deepcopy(base), adapter_name=ADAPTER_NAME)
    fuse_products(module)
    return module


def make_pair(init: str, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[nn.Module, nn.Module]:
    """One projection with an adapter, as peft makes and runs it, and as it is here."""
    base = make_base(dtype)
    theirs = peft.inject_adapter_in_model(make_config(True, **options), copy.deepcopy(base), adapter_name=ADAPTER_NAME)
    ours = inject(base, make_config(True, **options))
    torch.manual_seed(1)
    with torch.no_grad():  # what peft calls for a config with this `init_lora_weights`
        theirs[0].olora_init(ADAPTER_NAME) if init == "olora" else theirs[0].pissa_init(ADAPTER_NAME, init)
    torch.manual_seed(1)
    start_from_base(ours, init)
    return theirs, ours


def train(module: nn.Module, x: torch.Tensor, target: torch.Tensor) -> list[torch.Tensor]:
    """Three SGD steps on the adapter. Returns the outputs before each, and the adapter's weights after them."""
    adapter = [parameter for name, parameter in module.named_parameters() if "lora_" in name]
    seen = []
    for _ in range(3):
        output = module(x)
        gradients = torch.autograd.grad(((output - target) ** 2).mean(), adapter)
        seen.append(output.detach())
        with torch.no_grad():
            for parameter, gradient in zip(adapter, gradients, strict=True):
                parameter -= 0.5 * gradient
    return [*seen, *(parameter.detach().clone() for parameter in adapter)]


@pytest.mark.parametrize("options", [{}, {"use_rslora": True}])
@pytest.mark.parametrize("init", INITS)
def test_steps_are_those_of_peft_and_the_base_stays(init: str, options: dict[str, Any]) -> None:
    theirs, ours = make_pair(init, **options)
    before = make_base(torch.float32)[0]
    assert torch.equal(ours[0].base_layer.weight, before.weight)
    assert not torch.allclose(theirs[0].base_layer.weight, before.weight)
    x, target = torch.randn(ROWS, INPUTS), torch.randn(ROWS, OUTPUTS)
    torch.testing.assert_close(ours(x), before(x), rtol=1e-5, atol=1e-6)  # nothing is learned yet
    for actual, expected in zip(train(ours, x, target), train(theirs, x, target), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert (ours(x) - before(x)).abs().max() > 1e-2
    with adapter_off(ours):  # the reference of preferences
        assert torch.equal(ours(x), before(x))


def test_dropout_leaves_what_is_subtracted_alone() -> None:
    theirs, ours = make_pair("pissa", lora_dropout=0.5)
    x = torch.randn(ROWS, INPUTS)
    outputs = []
    for module in (theirs, ours):
        torch.manual_seed(2)
        outputs.append(module.train()(x))
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-4, atol=1e-5)


def test_in_bf16_the_adapter_starts_at_nothing() -> None:
    """peft rounds the base weight once more; here its own values stay."""
    _, ours = make_pair("pissa", torch.bfloat16)
    assert ours[0].lora_A[ADAPTER_NAME].weight.dtype == ours[0].start_A.dtype
    x = torch.randn(ROWS, INPUTS).bfloat16()
    torch.testing.assert_close(ours(x), make_base(torch.bfloat16)(x), rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("options", [{}, {"use_rslora": True}])
def test_a_file_has_a_plain_adapter_of_twice_the_rank_and_gives_back_the_run(options: dict[str, Any]) -> None:
    _, ours = make_pair("pissa", **options)
    x, target = torch.randn(ROWS, INPUTS), torch.randn(ROWS, OUTPUTS)
    train(ours, x, target)
    tensors = {name: ours.get_parameter(name).detach() for name in adapter_names(ours)}
    saved, config = join_starts(ours, tensors), describe_saved(make_config("pissa", **options))
    assert config.r == 2 * RANK and config.init_lora_weights is True
    plain = peft.inject_adapter_in_model(config, make_base(torch.float32), adapter_name=ADAPTER_NAME)
    fill_adapter(plain, saved)
    torch.testing.assert_close(plain(x), ours(x), rtol=1e-5, atol=1e-5)

    resumed = inject(make_base(torch.float32), make_config(True, **options))
    fill_adapter(resumed, restore_starts(resumed, saved))
    assert torch.equal(resumed(x), ours(x))
    again = join_starts(resumed, {name: resumed.get_parameter(name).detach() for name in tensors})
    assert all(torch.equal(tensor, saved[name]) for name, tensor in again.items())


def test_other_adapters_are_saved_as_they_are() -> None:
    module, config = inject(make_base(), make_config(True)), make_config(True)
    tensors = {name: module.get_parameter(name).detach() for name in adapter_names(module)}
    saved = join_starts(module, tensors)
    assert all(saved[name] is tensor for name, tensor in tensors.items()) and describe_saved(config).r == RANK


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_a_rank_that_a_weight_does_not_have_is_refused(init: str) -> None:
    module = inject(make_base(torch.float32), make_config(True, r=INPUTS + 1))
    with pytest.raises(UserError, match=rf"adapter.r=41: with adapter.init_lora_weights={init} at most the rank of "):
        start_from_base(module, init)
