"""The sums of what a loss reports besides itself."""

from __future__ import annotations

import torch


class MetricSums:
    """The sums of some metrics over their terms, and the number of terms in each, until they are taken.

    A metric is a mean over terms, such as tokens or pairs: sums and numbers add up over micro-batches and ranks.

    names: the names of the metrics, K of them.
    """

    def __init__(self, *names: str) -> None:
        self.names = names
        self._totals: torch.Tensor | None = None

    def add(self, sums: torch.Tensor, num_terms: torch.Tensor | int) -> None:
        """Add the sums of the metrics over some terms, [K]. num_terms: in each sum, [K], or one number for all."""
        sums = sums.detach().double()
        counts = num_terms.to(sums) if isinstance(num_terms, torch.Tensor) else sums.new_full((), num_terms)
        totals = torch.stack([sums, counts.expand_as(sums)])
        self._totals = totals if self._totals is None else self._totals + totals

    def take(self) -> torch.Tensor | None:
        """Return the sums and the numbers of terms since the last call, float64 [2, K]; None if nothing was added."""
        totals, self._totals = self._totals, None
        return totals
