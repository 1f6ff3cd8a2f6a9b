"""Metrics that are means over the terms of whole global batches: each rank's loss sums its own terms, and an
all-reduce adds them up."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist


class TotalsLoss(Protocol):
    """A loss that also sums its metrics."""

    metrics: tuple[str, ...]

    def take_totals(self) -> torch.Tensor | None:
        """Return the sums of `metrics` since the last call, and the number of terms in each: float64 [2, K]; None
        without terms.
        """
        ...


class ReportedMeans:
    """Means over the ranks that hold the loss, returned on every rank. A mean over no terms is omitted."""

    def __init__(self, loss: TotalsLoss, device: torch.device) -> None:
        self._loss, self._device = loss, device
        self._interval = self._zeros()

    def add_step(self, counts: bool) -> None:
        """Add the last step's totals to the interval, or discard them."""
        totals = self._loss.take_totals()
        if counts and totals is not None:
            self._interval += totals

    def finish_interval(self) -> dict[str, float]:
        """Return the means over the steps since the last call; empty without steps. All ranks call it."""
        totals, self._interval = self._interval, self._zeros()
        return self._compute_means(totals)

    def finish_evaluation(self) -> dict[str, float]:
        """Return the means over the evaluation since the last step. All ranks call it."""
        totals = self._loss.take_totals()
        means = self._compute_means(self._zeros() if totals is None else totals)
        return {f"eval_{name}": mean for name, mean in means.items()}

    def _compute_means(self, totals: torch.Tensor) -> dict[str, float]:
        dist.all_reduce(totals)
        sums, counts = totals.tolist()
        return {
            name: total / count for name, total, count in zip(self._loss.metrics, sums, counts, strict=True) if count
        }

    def _zeros(self) -> torch.Tensor:
        return torch.zeros(2, len(self._loss.metrics), dtype=torch.float64, device=self._device)
