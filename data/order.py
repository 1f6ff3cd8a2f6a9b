"""The order of samples: a pure function of (seed, epoch, step), whatever the layout.

Global batch k of an epoch is the k-th slice of the epoch's permutation, so resuming is a lookup and not a replay, and
a run that goes on with other numbers of stages, ranks or workers sees the same data. An epoch is floor(samples / global
batch) steps; which few samples an epoch leaves out changes from epoch to epoch.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from errors import UserError


@dataclass(frozen=True)
class GlobalOrder:
    """Which samples make up the global batch of each step; steps count from 0 over the whole run."""

    num_samples: int
    global_batch_size: int
    seed: int
    unit: str = "samples"  # what the user is told that there are too few of

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise UserError(f"seed={self.seed} is negative; give 0 or more")
        if self.steps_per_epoch == 0:
            raise UserError(
                f"train_file holds {self.num_samples} {self.unit}, fewer than one global batch"
                f" (global_batch_size={self.global_batch_size}); lower global_batch_size (micro_batch_size x"
                " gradient_accumulation_steps x data-parallel size) or give more data"
            )

    @property
    def steps_per_epoch(self) -> int:
        return self.num_samples // self.global_batch_size

    def sample_ids(self, step: int) -> np.ndarray:
        """The sample ids of a step's global batch, int64 [global_batch_size], read-only."""
        epoch, step_of_epoch = divmod(step, self.steps_per_epoch)
        start = step_of_epoch * self.global_batch_size
        return _permute(self.num_samples, self.seed, epoch)[start : start + self.global_batch_size]


# Steps come in order, so the last epoch's permutation (8 bytes a sample) is the only one worth keeping.
@lru_cache(maxsize=1)
def _permute(num_samples: int, seed: int, epoch: int) -> np.ndarray:
    permutation = np.random.Generator(np.random.PCG64([seed, epoch])).permutation(num_samples)
    permutation.flags.writeable = False
    return permutation


def micro_batch_ids(
    sample_ids: np.ndarray, micro_batch: int, dp_rank: int, dp_size: int, micro_batch_size: int
) -> np.ndarray:
    """The slice of a global batch that a data-parallel rank reads as its micro-batch number `micro_batch`."""
    start = (micro_batch * dp_size + dp_rank) * micro_batch_size
    return sample_ids[start : start + micro_batch_size]
