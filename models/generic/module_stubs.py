"""Stubs in place of a model's modules, so that its own forward pass shows what it does around them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import MoeModelOutputWithPast


class BackboneOutputs(MoeModelOutputWithPast):
    """The outputs of a backbone; every field that is not given is None."""

    def __getattr__(self, name: str) -> None:
        return None


class StopForward(Exception):
    """Ends a forward pass as soon as it has reached the wanted hidden states."""

    def __init__(self, hidden_states: torch.Tensor) -> None:
        self.hidden_states = hidden_states


class ModuleStub:
    """Stands in for a module: has its attributes, and calls `function`."""

    def __init__(self, original: nn.Module, function: Callable[..., Any]) -> None:
        self._original, self._function = original, function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "_original":  # while it is copied
            raise AttributeError(name)
        return getattr(self._original, name)


def with_others(hidden_states: torch.Tensor, num_outputs: int) -> Any:
    """Return hidden states as a layer with `num_outputs` outputs does: first in a tuple of None, or alone for 0."""
    return hidden_states if num_outputs == 0 else (hidden_states, *[None] * (num_outputs - 1))


def replace_child(owner: nn.Module, name: str, value: Any) -> None:
    """Replace a child of a module by anything; a module rejects values other than modules under a child's name."""
    delattr(owner, name)
    setattr(owner, name, value)


@contextmanager
def substitute(model: nn.Module, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Replace a module of the model by a stub that calls `function`, within the block."""
    owner_name, _, own_name = name.rpartition(".")
    owner = model.get_submodule(owner_name)
    before = getattr(owner, own_name)
    replace_child(owner, own_name, ModuleStub(before, function))
    try:
        yield
    finally:
        replace_child(owner, own_name, before)
