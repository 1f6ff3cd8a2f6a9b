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

    __slots__ = ("_function", "_given", "_made", "_saved", "_versions")

    def __init__(self, function: Callable[..., Any], given: tuple[Any, ...]) -> None:
        self._function, self._given = function, given
        self._versions = _read_versions(given)
        # Shape and dtype of the tensors that were saved, by their numbers
        self._saved: list[tuple[torch.Size, torch.dtype]] = []
        self._made: list[torch.Tensor | None] = []  # again, in the backward pass; None once they are used

    def number(self, tensor: torch.Tensor) -> int:
        self._saved.append((tensor.shape, tensor.dtype))
        return len(self._saved) - 1

    def find(self, number: int) -> torch.Tensor:
        """Return a tensor, once. The first call runs the function again."""
        if not self._made:
            self._run_again()
        tensor, self._made[number] = self._made[number], None
        if tensor is None:
            raise RuntimeError(
                "a saved tensor of a recomputed layer was asked for twice: a layer that is recomputed has one backward "
                "pass, and reads ctx.saved_tensors once"
            )
        return tensor

    def _run_again(self) -> None:
        if _read_versions(self._given) != self._versions:
            raise RuntimeError(
                "an input of a recomputed layer was changed in place after the layer began; a second run would take "
                "other values"
            )
        try:
            with torch.enable_grad(), saved_tensors_hooks(self._keep, _refuse):
                self._function(*self._given)
        except _AllMade:
            pass
        except BaseException:
            self._made.clear()
            raise
        if len(self._made) != len(self._saved):
            raise RuntimeError(_explain(f"{len(self._made)} tensors for {len(self._saved)}"))
        self._given = ()

    def _keep(self, tensor: torch.Tensor) -> None:
        number = len(self._made)
        shape, dtype = self._saved[number]
        if (tensor.shape, tensor.dtype) != (shape, dtype):
            found, before = (f"{list(each)} in {kind}" for each, kind in ((tensor.shape, tensor.dtype), (shape, dtype)))
            raise RuntimeError(_explain(f"a tensor of shape {found} for {before}"))
        # A frozen weight itself, as torch does: ZeRO-3 frees and fetches what it holds
        self._made.append(tensor.detach() if tensor.requires_grad else tensor)
        if len(self._made) == len(self._saved):
            raise _AllMade


def _read_versions(given: tuple[Any, ...]) -> list[int]:
    """Return how often each tensor was changed in place, as autograd counts it."""
    return [each._version for each in given if isinstance(each, torch.Tensor)]


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
