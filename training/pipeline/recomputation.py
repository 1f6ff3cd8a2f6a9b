"""Functions whose saved tensors are made again in the backward pass: `torch.utils.checkpoint` without reentrance, for
those that draw no random numbers, under no autocast, and for one backward pass.

It runs the same operators, and stops where torch's stops: when the last tensor that was saved is made, so before the
last product of a layer. torch's keeps objects, weak references and contexts for what is left out here, and takes the
host longer with them than to run a small layer (docs/performance.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks


class _AllMade(Exception):
    """Ends a second run."""


class _Run:
    """One run of a function. The tensors that it saves for the backward pass are numbered, and not kept."""

    __slots__ = ("_function", "_given", "_made", "_shapes")

    def __init__(self, function: Callable[..., Any], given: tuple[Any, ...]) -> None:
        self._function, self._given = function, given
        self._shapes: list[torch.Size] = []  # of the tensors that were saved, by their numbers
        self._made: list[torch.Tensor | None] = []  # again, in the backward pass; None once they are used

    def number(self, tensor: torch.Tensor) -> int:
        self._shapes.append(tensor.shape)
        return len(self._shapes) - 1

    def find(self, number: int) -> torch.Tensor:
        """Return a tensor, once. The first call runs the function again."""
        if not self._made:
            with torch.enable_grad(), saved_tensors_hooks(self._keep, _refuse):
                try:
                    self._function(*self._given)
                except _AllMade:
                    pass
            if len(self._made) != len(self._shapes):
                raise RuntimeError(_explain(f"{len(self._made)} tensors for {len(self._shapes)}"))
            self._given = ()
        tensor, self._made[number] = self._made[number], None
        if tensor is None:
            raise RuntimeError("a saved tensor of a recomputed layer was asked for twice: read ctx.saved_tensors once")
        return tensor

    def _keep(self, tensor: torch.Tensor) -> None:
        number = len(self._made)
        if tensor.shape != self._shapes[number]:
            raise RuntimeError(_explain(f"a tensor of shape {list(tensor.shape)} for {list(self._shapes[number])}"))
        # A frozen weight itself, as torch does: ZeRO-3 frees and fetches what it holds
        self._made.append(tensor.detach() if tensor.requires_grad else tensor)
        if len(self._made) == len(self._shapes):
            raise _AllMade


def recompute(function: Callable[..., Any], *given: Any) -> Any:
    """Return `function(*given)`; its saved tensors are made again in the backward pass."""
    if not torch.is_grad_enabled():
        return function(*given)
    run = _Run(function, given)
    with saved_tensors_hooks(run.number, run.find):
        return function(*given)


def _explain(found: str) -> str:
    return f"a layer saved other tensors when it was recomputed than before ({found}); it has to be repeatable"


def _refuse(_: None) -> torch.Tensor:
    raise RuntimeError("the graph of a recomputed layer has no backward pass of its own")
