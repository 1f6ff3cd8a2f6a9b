"""An elementwise update of weights and optimizer state, chunk by chunk: operator by operator, each of which reads and
writes memory, or compiled to one kernel that reads and writes everything once.

A compiled update is the same formula. It rounds as it likes where a processor multiplies and adds at once, so results
may differ by the last bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from training.optim.chunks import split_flat

# Smaller tensors, such as those that an optimizer is checked with before a run, are not worth a compilation
_FEWEST_COMPILED = 2**10


class ElementwiseUpdate:
    """formula: called with the same chunk of each tensor, with scalars that change from step to step as keywords, and
    with constants; it writes into the chunks. compiles: compile it when it is first called, once for all sizes."""

    def __init__(self, formula: Callable[..., None], compiles: bool) -> None:
        self._formula = formula
        self._compiled = torch.compile(formula, dynamic=True, fullgraph=True) if compiles else None

    def __call__(self, *tensors: torch.Tensor, scalars: dict[str, float], constants: dict[str, Any]) -> None:
        """Update tensors with the same number of elements, in place."""
        run, values = self._formula, dict[str, Any](scalars)
        if self._compiled is not None and tensors[0].numel() >= _FEWEST_COMPILED:
            # A number would be a constant of the compiled code, which would be made again in each step
            run = self._compiled
            values = {name: torch.tensor(value, dtype=torch.float32) for name, value in scalars.items()}
        for chunk in split_flat(*(tensor.detach() for tensor in tensors)):
            run(*chunk, **values, **constants)


def scale_last(change: torch.Tensor, scale: Any) -> tuple[torch.Tensor, float]:
    """Return the change and the factor to add it with: its scale, where that is a number, which saves a pass over it;
    else the change is scaled in place, and the factor is 1."""
    return (change, scale) if isinstance(scale, float) else (change.mul_(scale), 1.0)
