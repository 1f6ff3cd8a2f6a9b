"""Recomputation runs, keeps and returns the same as that of torch, to the bit."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support.families import build_family_config
from support.operators import CountedOperators
from torch.utils.checkpoint import checkpoint

from models.architecture.lookup import build_layers
from training.pipeline.recomputation import recompute

B, T = 2, 16
Run = Callable[..., Any]
by_torch: Run = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)


@pytest.mark.parametrize("family", ["llama", "mixtral", "gemma3_text", "mamba2", "phi", "deepseek_v3"])
def test_two_layers_are_recomputed_as_torch_does_it(family: str) -> None:
    config = build_family_config(family)
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    layers = [layer.module_class(*layer.args) for layer in build_layers(config)[1:3]]
    for parameter in (each for layer in layers for each in layer.parameters()):
        torch.nn.init.normal_(parameter, std=0.2)
    start = torch.randn(B, T, config.hidden_size, requires_grad=True)
    integers = torch.arange(T).expand(B, T).clone(), torch.ones(B, T, dtype=torch.int32)
    found = {}
    for run in (by_torch, recompute):
        for each in (start, *(parameter for layer in layers for parameter in layer.parameters())):
            each.grad = None
        states = (start, *integers)
        for layer in layers:
            states = run(lambda *states, layer=layer: layer(states), *states)
        with CountedOperators() as counted:
            states[0].square().sum().backward()
        gradients = [each.grad for layer in layers for each in layer.parameters()]
        found[run] = [counted.calls, start.grad, *gradients]
    calls, ours = found[by_torch][0] - Counter(detach=10**6), found[recompute][0] - Counter(detach=10**6)
    assert ours == calls
    for gradient, other in zip(found[recompute][1:], found[by_torch][1:], strict=True):
        assert (gradient is None and other is None) or torch.equal(gradient, other)


def test_nothing_is_kept_before_the_backward_pass_or_after_it() -> None:
    made: list[weakref.ref] = []

    def run(inputs: torch.Tensor) -> torch.Tensor:
        middle = inputs.exp()
        made.append(weakref.ref(middle))
        return middle.square().sum()

    inputs = torch.randn(4, requires_grad=True)
    gc.disable()  # nothing waits for it
    try:
        output = recompute(run, inputs)
        assert made[0]() is None
        output.backward()
        del output
        assert len(made) == 2 and made[1]() is None
    finally:
        gc.enable()
    assert torch.equal(inputs.grad, (2 * inputs.exp() * inputs.exp()).detach())


def test_without_gradients_it_is_the_function() -> None:
    with torch.no_grad():
        assert recompute(torch.exp, torch.zeros(2)).grad_fn is None


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (lambda values: values[:2].exp().sum(), r"a tensor of shape \[2\] for \[4\]\); it has to be repeatable"),
        (lambda values: values.sum(), r"0 tensors for 1\); it has to be repeatable"),
    ],
)
def test_a_layer_that_is_not_repeatable(second: Run, message: str) -> None:
    functions = [lambda values: values.exp().sum(), second]
    output = recompute(lambda values: functions.pop(0)(values), torch.randn(4, requires_grad=True))
    with pytest.raises(RuntimeError, match=message):
        output.backward()


def test_a_second_backward_pass_is_refused() -> None:
    output = recompute(lambda values: values.exp().sum(), torch.randn(4, requires_grad=True))
    output.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="was asked for twice"):
        output.backward()
