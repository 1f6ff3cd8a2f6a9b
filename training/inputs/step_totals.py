"""The totals of each step's global batch on every rank, whether or not it holds data."""

from __future__ import annotations

from dataclasses import astuple, fields
from typing import Any

import torch
import torch.distributed as dist

from data.loading.step_totals import StepTotals

STEPS_AT_ONCE = 16  # the order is a function of the step, so a broadcast is needed only once in so many steps


class SharedTotals:
    """Rank 0, which reads inputs, computes them; the others receive them."""

    def __init__(self, loader: Any, last_step: int, group: dist.ProcessGroup | None = None) -> None:
        """loader: this rank's. last_step: steps below it are asked for. group: of all ranks, for what is in the host's
        memory; the default group otherwise."""
        self._loader, self._last_step, self._group = loader, last_step, group
        self._known: dict[int, StepTotals] = {}

    def of_step(self, step: int) -> StepTotals:
        """All ranks call it, for the same steps in the same order."""
        if step not in self._known:
            steps = range(step, min(step + STEPS_AT_ONCE, self._last_step))
            numbers = torch.zeros(len(steps), len(fields(StepTotals)), dtype=torch.int64)
            if dist.get_rank() == 0:
                numbers = torch.tensor([astuple(self._loader.step_totals(each)) for each in steps])
            dist.broadcast(numbers, src=0, group=self._group)
            self._known = {each: StepTotals(*row) for each, row in zip(steps, numbers.tolist(), strict=True)}
        return self._known[step]
