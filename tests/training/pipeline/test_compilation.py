"""The limit of what torch compiles of one function: high enough, and not reached in silence."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch
import torch.compiler.config as compiler

import console
from training.pipeline import compilation


class Scaled(torch.nn.Module):
    """Each factor is compiled by itself: torch takes a module's integers for constants."""

    def __init__(self, factor: int) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states * self.factor


@pytest.fixture
def said() -> Iterator[list[str]]:
    """Returns the text on the screen. The compiler itself is not needed: what is traced runs as it is."""
    shown: list[str] = []
    limit, compile_module = compiler.recompile_limit, torch.nn.Module.compile
    with (
        patch.object(console, "say", shown.append),
        patch.object(torch.nn.Module, "compile", lambda module: compile_module(module, backend="eager")),
    ):
        yield shown
    compiler.recompile_limit = limit
    torch.compiler.reset()
    compilation.logging.getLogger("torch._dynamo.convert_frame").handlers.clear()


def run(num_kinds: int) -> None:
    layers = [Scaled(factor) for factor in range(num_kinds)]
    compilation.compile_layers(layers, rank=3)
    for factor, layer in enumerate(layers):
        assert layer(torch.ones(2)).tolist() == [factor, factor]


def test_a_dozen_kinds_of_layers_are_compiled(said: list[str]) -> None:
    run(12)
    assert said == []


def test_the_limit_is_named_once_with_the_way_out(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "VARIANTS", 2)
    compiler.recompile_limit = 2
    run(6)
    run(6)
    (line,) = said
    assert line.startswith("warning: compile=true: rank 3 has compiled 2 variants of a layer")
    assert "data.pad_to=max_seq_length" in line and "compile=false" in line
