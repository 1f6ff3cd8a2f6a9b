"""The totals of each step's global batch on every rank, whether or not it holds data."""

from __future__ import annotations

from dataclasses import astuple, fields
from typing import Any

import torch
import torch.distributed as dist

from data.loading.step_totals import StepTotals

STEPS_AT_ONCE = 16  # samples are ordered in advance, so one broadcast serves this many steps


class SharedTotals:
    """The totals of each step: computed on rank 0, which reads inputs, and broadcast to the others."""

    def __init__(self, loader: Any, last_step: int, group: dist.ProcessGroup | None = None) -> None:
        """loader: this rank's training loader. last_step: the exclusive upper bound of the steps. group: all ranks, for
        tensors in host memory; the default group otherwise."""
        self._loader, self._last_step, self._group = loader, last_step, group
        self._known: dict[int, StepTotals] = {}

    def get(self, step: int) -> StepTotals:
        """Return the totals of a step (from 0). All ranks call it, for the same steps in the same order."""
        if step not in self._known:
            steps = range(step, min(step + STEPS_AT_ONCE, self._last_step))
            numbers = torch.zeros(len(steps), len(fields(StepTotals)), dtype=torch.int64)
            if dist.get_rank() == 0:
                numbers = torch.tensor([astuple(self._loader.step_totals(each)) for each in steps])
            dist.broadcast(numbers, src=0, group=self._group)
            self._known = {each: StepTotals(*row) for each, row in zip(steps, numbers.tolist(), strict=True)}
        return self._known[step]
