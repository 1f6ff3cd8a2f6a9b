"""Other things in the places of a model's modules, so that its own forward pass shows what it does around them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import MoeModelOutputWithPast


class BackboneOutputs(MoeModelOutputWithPast):
    """Of a backbone that has nothing else to say."""

    def __getattr__(self, name: str) -> None:
        return None


class StopForward(Exception):
    """Ends a forward pass where it has done what it was called for."""

    def __init__(self, hidden_states: torch.Tensor) -> None:
        self.hidden_states = hidden_states


class ModuleStub:
    """Stands in the place of a module: has its attributes, and calls `function`."""

    def __init__(self, original: nn.Module, function: Callable[..., Any]) -> None:
        self._original, self._function = original, function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def with_others(hidden_states: torch.Tensor, num_outputs: int) -> Any:
    """What a layer returns that returns so many things; the others are None."""
    return hidden_states if num_outputs == 0 else (hidden_states, *[None] * (num_outputs - 1))


def replace_child(owner: nn.Module, name: str, value: Any) -> None:
    """A module keeps no other things under a name that a child has."""
    delattr(owner, name)
    setattr(owner, name, value)


@contextmanager
def substitute(model: nn.Module, name: str, function: Callable[..., Any]) -> Iterator[None]:
    owner_name, _, own_name = name.rpartition(".")
    owner = model.get_submodule(owner_name)
    before = getattr(owner, own_name)
    replace_child(owner, own_name, ModuleStub(before, function))
    try:
        yield
    finally:
        replace_child(owner, own_name, before)
