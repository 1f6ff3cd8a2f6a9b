"""Optimizers whose update is a formula of each element: run chunk by chunk, operator by operator, each of which reads
and writes memory, or compiled to one kernel that reads and writes everything once.

A compiled update is the same formula. It rounds as it likes where a processor multiplies and adds at once, so results
may differ by the last bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from training.optim.chunks import split_flat

# Smaller tensors, such as those that an optimizer is checked with before a run, are not worth a compilation
_FEWEST_COMPILED = 2**10


class ElementwiseOptimizer(torch.optim.Optimizer):
    """An optimizer whose subclass gives the formula of its update, and the state that it keeps of each parameter.

    elementwise: the names of the state with one number per element, in the formula's order.
    """

    elementwise: tuple[str, ...]

    def __init__(
        self, params: Iterable[Any], defaults: dict[str, Any], formula: Callable[..., None], compiles: bool
    ) -> None:
        """formula: called with the same chunk of weights, gradient in fp32 and the state named in `elementwise`, and as
        keywords with the scalars and constants of `choose_rates`; it writes into weights and state. compiles: compile
        it when it is first called, once for all sizes."""
        super().__init__(params, defaults)
        self._formula = _complete(formula)
        self._compiled = torch.compile(self._formula, dynamic=True) if compiles else None

    def start_state(self, weights: torch.Tensor) -> dict[str, Any]:
        """Return the state of a parameter before its first step."""
        raise NotImplementedError

    def choose_rates(self, group: dict[str, Any], state: dict[str, Any]) -> tuple[dict[str, float], dict[str, Any]]:
        """Count a step of a parameter in its state, and return the scalars that change from step to step, and the
        constants."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for weights in group["params"]:
                if weights.grad is not None:
                    self.update(group, weights, weights.grad)

    @torch.no_grad()
    def update(
        self,
        group: dict[str, Any],
        weights: torch.nn.Parameter,
        gradient: torch.Tensor,
        factor: float = 1.0,
        copy: torch.Tensor | None = None,
    ) -> None:
        """Update one parameter of a group. gradient: of any floating dtype; it stays as it is. factor: that the
        gradient is multiplied by. copy: where the new weights are written too, in its dtype."""
        state = self.state[weights]
        if not state:
            state.update(self.start_state(weights))
        scalars, constants = self.choose_rates(group, state)
        run: Callable[..., None] = self._formula
        numbers: Any = [factor, *scalars.values()]
        if self._compiled is not None and weights.numel() >= _FEWEST_COMPILED:
            # A number would be a constant of the compiled code, which would be made again in each step
            run, numbers = self._compiled, torch.tensor(numbers, dtype=torch.float32, device=weights.device)
        tensors = [weights.detach(), gradient.detach(), *(state[name] for name in self.elementwise)]
        for chunk in split_flat(*tensors, *([] if copy is None else [copy])):
            run(chunk[: len(tensors)], chunk[len(tensors) :], numbers, tuple(scalars), constants)


def _complete(formula: Callable[..., None]) -> Callable[..., None]:
    """Return the whole update of a chunk. numbers: the gradient's factor and the scalars, as numbers or, compiled, one
    tensor. copies: of the weights, at most one."""

    def run(
        tensors: Sequence[torch.Tensor],
        copies: Sequence[torch.Tensor],
        numbers: Any,
        names: tuple[str, ...],
        constants: dict[str, Any],
    ) -> None:
        factor, *scalars = numbers.unbind() if isinstance(numbers, torch.Tensor) else numbers
        weights, gradient, *state = tensors
        if isinstance(factor, torch.Tensor) or factor != 1.0 or gradient.dtype is not torch.float32:
            gradient = gradient.float() * factor
        formula(weights, gradient, *state, **dict(zip(names, scalars)), **constants)
        for copy in copies:
            copy.copy_(weights)

    return run


def scale_last(change: torch.Tensor, scale: Any) -> tuple[torch.Tensor, float]:
    """Return the change and the factor to add it with: its scale, where that is a number, which saves a pass over it;
    else the change is scaled in place, and the factor is 1."""
    return (change, scale) if isinstance(scale, float) else (change.mul_(scale), 1.0)
