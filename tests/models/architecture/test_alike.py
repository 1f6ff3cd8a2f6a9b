"""Layers are built alike unless their constructor looks at their number, in whatever way it does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from models.architecture.alike import list_alike, map_alike
from models.layers.layer import Layer

Use = Callable[[Any], Any]


def list_layers(use: Use) -> list[Layer]:
    class Numbered(nn.Module):
        def __init__(self, number: int, size: int) -> None:
            super().__init__()
            self.number = number
            use(number)
            self.linear = nn.Linear(4, 4)

    return [Layer(f"{number}.", Numbered, (number, "size")) for number in range(4)]


@pytest.mark.parametrize(
    "use",
    [
        lambda number: None,
        lambda number: [number],
        lambda number: number is None,
        lambda number: isinstance(number, int),
    ],
)
def test_a_number_that_is_only_stored_makes_no_difference(use: Use) -> None:
    assert list_alike(list_layers(use)) == [0, 0, 0, 0]


@pytest.mark.parametrize(
    "use",
    [
        lambda number: number % 2,
        lambda number: 1 + number,
        lambda number: number == 3,
        lambda number: number in (1, 3),
        lambda number: "abcd"[number],
        lambda number: {0: 1}.get(number),
        lambda number: f"{number}",
        lambda number: number < 2,
        lambda number: number or None,
        lambda number: range(number),
        lambda number: number.bit_length(),
        lambda number: nn.Linear(number, 1),
    ],
)
def test_a_number_that_is_looked_at_does(use: Use) -> None:
    assert list_alike(list_layers(use)) == [0, 1, 2, 3]


def test_a_function_is_called_once_for_those_that_are_alike() -> None:
    called = []

    def name(layer: Layer) -> str:
        called.append(layer)
        return layer.hf_prefix

    layers = [*list_layers(lambda number: None), Layer("head.", nn.Linear, (2, 3))]
    assert map_alike(name, layers) == ["0.", "0.", "0.", "0.", "head."] and len(called) == 2
