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
        (
            lambda values: values[:2].exp().sum(),
            r"shape \[2\] in torch.float32 for \[4\] in torch.float32\); it has to be repeatable",
        ),
        (
            lambda values: values.bfloat16().exp().float().sum(),
            r"shape \[4\] in torch.bfloat16 for \[4\] in torch.float32\); it has to be repeatable",
        ),
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


def change_own(layer_input: torch.Tensor, weight: torch.Tensor, run: Run) -> torch.Tensor:
    return run(lambda hidden: (hidden.add_(weight) * weight).exp(), layer_input)


def change_later(layer_input: torch.Tensor, weight: torch.Tensor, run: Run) -> torch.Tensor:
    output = run(lambda hidden: (hidden * weight).exp(), layer_input)
    layer_input.mul_(3)
    return output


def change_integers(layer_input: torch.Tensor, weight: torch.Tensor, run: Run) -> torch.Tensor:
    positions = torch.arange(4)
    output = run(lambda hidden, order: (hidden[order] * weight).exp(), layer_input, positions)
    positions.copy_(positions.flip(0))
    return output


@pytest.mark.parametrize("change", [change_own, change_later, change_integers])
def test_an_input_that_is_changed_in_place_is_refused(change: Callable[..., torch.Tensor]) -> None:
    for run, message in ((by_torch, "modified by an inplace"), (recompute, "input of a recomputed layer was changed")):
        weight = torch.full((4,), 2.0, requires_grad=True)
        output = change(torch.randn(4, requires_grad=True) * 1.0, weight, run)
        with pytest.raises(RuntimeError, match=message):
            output.sum().backward()


def test_a_second_run_that_fails_can_be_made_again() -> None:
    runs: list[int] = []

    def fail_once(values: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        first = values.exp()
        if len(runs) == 2:
            raise MemoryError
        return (first * first).sum()

    inputs = torch.randn(4, requires_grad=True)
    output = recompute(fail_once, inputs)
    with pytest.raises(MemoryError):
        output.backward(retain_graph=True)
    output.backward()
    assert torch.allclose(inputs.grad, 2 * (2 * inputs.detach()).exp())
