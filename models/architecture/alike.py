"""Which layers of a model are built alike, so that what follows from a module is found once for all of them.

A model of 80 decoder layers builds 80 modules that differ in nothing but their number. Which do not is not known of a
family: its constructor may choose by the number (every second layer has experts, or a window). So a layer is built with
a number that notes whether it is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from models.layers.layer import Layer


class _Number:
    """Stands in for an int, and notes whether anything is asked of it."""

    def __init__(self, value: int) -> None:
        self.value, self.is_used = value, False

    @property  # type: ignore[misc]  # what isinstance() asks for, and answers alike for all ints
    def __class__(self) -> type:
        return int

    def __getattr__(self, name: str) -> Any:
        self.is_used = True
        return getattr(self.value, name)


def _note(method: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: _Number, *arguments: Any) -> Any:
        self.is_used = True
        return method(self.value, *(each.value if type(each) is _Number else each for each in arguments))

    return call


for _name in (
    *("abs", "add", "and", "bool", "ceil", "divmod", "eq", "float", "floor", "floordiv", "format", "ge", "gt", "hash"),
    *("index", "int", "invert", "le", "lshift", "lt", "mod", "mul", "ne", "neg", "or", "pos", "pow", "radd", "rand"),
    *("rdivmod", "repr", "rfloordiv", "rlshift", "rmod", "rmul", "ror", "round", "rpow", "rrshift", "rshift", "rsub"),
    *("rtruediv", "rxor", "str", "sub", "truediv", "trunc", "xor"),
):
    setattr(_Number, f"__{_name}__", _note(getattr(int, f"__{_name}__")))


def list_alike(layers: Sequence[Layer]) -> list[int]:
    """Return for each layer the index of the first one that is built alike: by the same class, from the same arguments
    but for numbers that its constructor stores and does not look at."""
    first: dict[tuple[Any, ...], tuple[int, bool]] = {}
    found = []
    for index, layer in enumerate(layers):
        others = tuple(None if type(argument) is int else id(argument) for argument in layer.args)
        recipe = (layer.module_class, others, layer.tied_key, layer.forward_fn, tuple(sorted(layer.styles)))
        if recipe not in first:
            first[recipe] = index, _ignores_numbers(layer)
        start, ignores_numbers = first[recipe]
        found.append(start if ignores_numbers else index)
    return found


def map_alike(function: Callable[[Layer], Any], layers: Sequence[Layer]) -> list[Any]:
    """Return what `function` returns for each layer, in their order. It is called once for those that are alike, so its
    result must follow from the layer's module alone."""
    alike = list_alike(layers)
    results = {index: function(layers[index]) for index in dict.fromkeys(alike)}
    return [results[index] for index in alike]


def _ignores_numbers(layer: Layer) -> bool:
    """Whether the constructor looks at no int among its arguments."""
    numbers = [_Number(argument) if type(argument) is int else argument for argument in layer.args]
    try:
        replace(layer, args=tuple(numbers)).build_on_meta()
    except Exception:  # what a constructor of any family does with a number that is none
        return False
    return not any(number.is_used for number in numbers if type(number) is _Number)
