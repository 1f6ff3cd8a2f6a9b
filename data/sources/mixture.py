"""Several sources in given proportions: how often each sample occurs in one epoch.

By `weight`, an epoch is the shortest in which every source is seen whole at least once: sources that are scarce
relative to their weight are repeated, and none is cut. By `epochs`, each source occurs that many times. A fraction of a
source is a random choice of its samples, the same in every run.

N samples, S sources, P samples of the mixture.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from data.options import MixtureUnit
from errors import UserError


class ShareKind(StrEnum):
    WEIGHT = "weight"
    EPOCHS = "epochs"


@dataclass(frozen=True)
class Mixture:
    """A share for each source: a weight, or how many times it occurs in an epoch of the mixture."""

    shares: tuple[float, ...]
    kind: ShareKind = ShareKind.WEIGHT
    unit: MixtureUnit = MixtureUnit.samples

    def __str__(self) -> str:
        return f"{self.kind} {', '.join(f'{share:g}' for share in self.shares)} by {self.unit.value}"

    def choose_samples(self, sources: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Return the sample ids of an epoch, int64 [P], grouped by source. sources, lengths: those of each sample, [N].

        Raises `UserError` for a source without a sample, and for shares that take none.
        """
        amounts = self._amounts(lengths)
        epochs = self._compute_epochs(_sum_by_source(sources, amounts, len(self.shares)))
        chosen = []
        for source, times in enumerate(epochs):
            ids = np.flatnonzero(sources == source)
            # A source that is seen once may come out of the division as 0.9999...
            whole = int(times + 1e-9)
            chosen += [np.tile(ids, whole), _choose_part(ids, amounts[ids], max(0.0, times - whole), source)]
        taken = np.concatenate(chosen)
        if not len(taken):
            raise UserError("train_file: an epoch of the mixture takes no sample; give larger shares (epochs)")
        return taken

    def describe(self, names: Sequence[str], sources: np.ndarray, lengths: np.ndarray, sample_ids: np.ndarray) -> str:
        """Return how much of each source an epoch holds, in words. sample_ids: what `choose_samples` returned."""
        amounts = self._amounts(lengths)
        count = len(self.shares)
        seen = _sum_by_source(sources[sample_ids], amounts[sample_ids], count)
        epochs = seen / _sum_by_source(sources, amounts, count)
        parts = [
            f"{name} {share:.1%} ({int(amount):,} {self.unit.value}, {times:.2f} times)"
            for name, share, amount, times in zip(names, seen / seen.sum(), seen, epochs, strict=True)
        ]
        return f"an epoch of the mixture, by {self.unit.value}: {', '.join(parts)}"

    def _amounts(self, lengths: np.ndarray) -> np.ndarray:
        return lengths.astype(np.float64) if self.unit is MixtureUnit.tokens else np.ones(len(lengths))

    def _compute_epochs(self, totals: np.ndarray) -> np.ndarray:
        """Return how many times each source occurs, [S]. totals: its samples or tokens, [S]."""
        if not totals.all():
            number = int(np.flatnonzero(totals == 0)[0]) + 1
            raise UserError(f"train_file: entry {number} of the mixture has no sample left; omit it, or fix its data")
        shares = np.array(self.shares)
        if self.kind is ShareKind.EPOCHS:
            return shares
        return shares / totals * (totals / shares).max()


def _sum_by_source(sources: np.ndarray, amounts: np.ndarray, count: int) -> np.ndarray:
    return np.bincount(sources, weights=amounts, minlength=count)


def _choose_part(ids: np.ndarray, amounts: np.ndarray, part: float, source: int) -> np.ndarray:
    """Return samples that make up `part` of the source, to the nearest sample."""
    shuffled = np.random.Generator(np.random.PCG64(source)).permutation(len(ids))
    upto = np.cumsum(amounts[shuffled]) - amounts[shuffled] / 2  # the middle of each sample
    return np.sort(ids[shuffled[upto < part * amounts.sum()]])
