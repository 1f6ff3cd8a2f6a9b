"""The totals of each step's global batch on every rank, whether or not it holds data."""

from __future__ import annotations

from dataclasses import astuple, fields
from typing import Any

import torch
import torch.distributed as dist

from data.loading.step_totals import StepTotals
from errors import UserError
from training.distributed.ranks import raise_together

STEPS_AT_ONCE = 16  # samples are ordered in advance, so one broadcast serves this many steps
UNKNOWN = -1  # in place of totals that cannot be computed


class SharedTotals:
    """The totals of each step: computed on rank 0, which reads inputs, and broadcast to the others."""

    def __init__(
        self, loader: Any, last_step: int, group: dist.ProcessGroup | None = None, steps_at_once: int = STEPS_AT_ONCE
    ) -> None:
        """loader: this rank's training loader. last_step: the exclusive upper bound of the steps. group: all ranks, for
        tensors in host memory; the default group otherwise. steps_at_once: 1 where samples are not known before."""
        self._loader, self._last_step, self._group = loader, last_step, group
        self._steps_at_once = steps_at_once
        self._known: dict[int, StepTotals] = {}

    def get(self, step: int) -> StepTotals:
        """Return the totals of a step (from 0). All ranks call it, for the same steps in the same order.

        Raises UserError, together on all ranks, for data that the main rank cannot read.
        """
        if step not in self._known:
            steps = range(step, min(step + self._steps_at_once, self._last_step))
            numbers = torch.full((len(steps), len(fields(StepTotals))), UNKNOWN)
            error = None
            if dist.get_rank() == 0:
                try:
                    numbers = torch.tensor([astuple(self._loader.step_totals(each)) for each in steps])
                except UserError as mistake:
                    error = mistake
            dist.broadcast(numbers, src=0, group=self._group)
            if numbers[0, 0] == UNKNOWN:
                raise_together(error)
            self._known = {each: StepTotals(*row) for each, row in zip(steps, numbers.tolist(), strict=True)}
        return self._known[step]
