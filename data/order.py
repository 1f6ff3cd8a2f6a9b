"""The order of samples: a pure function of (seed, epoch, step), whatever the layout.

Global batch k of an epoch is the k-th slice of the epoch's permutation, so resuming is a lookup and not a replay, and
a run that continues with other numbers of stages, ranks or workers sees the same data. An epoch is floor(samples /
global batch) steps; the few samples that an epoch omits change from epoch to epoch.

With lengths, samples of like lengths share a global batch: `BATCHES_PER_BIN` global batches of the permutation are a
bin, whose samples are sorted by length and cut into global batches again. Another permutation shuffles those of all
bins, so steps of short and long samples alternate.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import numpy as np

from errors import UserError

Ids = TypeVar("Ids", np.ndarray, range)
VERSION = 2  # raise it when the same seed gives another order
BATCHES_PER_BIN = 50  # lengths in a global batch differ by about a fiftieth of all lengths
ROUNDS = 8  # four suffice for large sizes; small ones need more


@dataclass(frozen=True)
class GlobalOrder:
    """The samples of each step's global batch; steps count from 0 over the whole run."""

    num_samples: int
    global_batch_size: int
    seed: int
    unit: str = "samples"  # what messages call them
    lengths: Callable[[np.ndarray], np.ndarray] | None = None  # of samples, given their ids; None does not sort by them

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise UserError(f"seed={self.seed} is negative; give 0 or more")
        if self.steps_per_epoch == 0:
            raise UserError(
                f"train_file holds fewer {self.unit} ({self.num_samples}) than one global batch"
                f" (global_batch_size={self.global_batch_size}); lower global_batch_size (micro_batch_size x"
                " gradient_accumulation_steps x data-parallel size) or give more data"
            )

    @property
    def steps_per_epoch(self) -> int:
        return self.num_samples // self.global_batch_size

    def sample_ids(self, step: int) -> np.ndarray:
        """Return the sample ids of a step's global batch, int64 [global_batch_size], read-only."""
        return _list_ids(self, step)


# A step's micro-batches are read in sequence, so one step is enough to keep.
@lru_cache(maxsize=1)
def _list_ids(order: GlobalOrder, step: int) -> np.ndarray:
    epoch, number = divmod(step, order.steps_per_epoch)
    ids = _list_alike(order, epoch, number) if order.lengths else _permute_batches(order, epoch, number, number + 1)
    ids.flags.writeable = False
    return ids


def _permute_batches(order: GlobalOrder, epoch: int, start: int, stop: int) -> np.ndarray:
    """Return the samples of consecutive global batches of an epoch's permutation."""
    places = np.arange(start * order.global_batch_size, stop * order.global_batch_size)
    return permute(places, order.num_samples, order.seed, epoch)


def _list_alike(order: GlobalOrder, epoch: int, number: int) -> np.ndarray:
    """Return the samples of a step of an epoch, which have like lengths."""
    assert order.lengths is not None
    batch = int(permute(np.array([number]), order.steps_per_epoch, order.seed, epoch, BATCHES_PER_BIN)[0])
    start = batch - batch % BATCHES_PER_BIN
    ids = _permute_batches(order, epoch, start, min(start + BATCHES_PER_BIN, order.steps_per_epoch))
    by_length = ids[np.argsort(order.lengths(ids), kind="stable")]
    first = (batch - start) * order.global_batch_size
    return by_length[first : first + order.global_batch_size]


def permute(places: np.ndarray, size: int, *key: int) -> np.ndarray:
    """Map `places` through the permutation of range(size) that the key, such as (seed, epoch), picks; int64, in their
    shape.

    No table of the permutation is made, so it costs no memory however many samples there are: a Feistel network (Luby,
    Rackoff 1988) permutes the next power of four, and what falls outside of range(size) is sent through it again until
    it is inside (cycle walking; Black, Rogaway 2002), fewer than four times on average.
    """
    half = np.uint64(max(3, ((size - 1).bit_length() + 1) // 2))  # bits; fewer shuffle badly
    keys = np.random.Generator(np.random.PCG64(key)).integers(0, 2**64, ROUNDS, np.uint64)
    walked = _encipher(places.astype(np.uint64), keys, half)
    while (outside := walked >= size).any():
        walked[outside] = _encipher(walked[outside], keys, half)
    return walked.astype(np.int64)


def _encipher(values: np.ndarray, keys: np.ndarray, half: np.uint64) -> np.ndarray:
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = values >> half, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return left << half | right


def _mix(values: np.ndarray) -> np.ndarray:
    """Mix each value so that every bit of the result depends on all of its bits: SplitMix64's finalizer (Steele, Lea,
    Flood 2014)."""
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)


def micro_batch_ids(sample_ids: Ids, micro_batch: int, *, dp_rank: int, dp_size: int, micro_batch_size: int) -> Ids:
    """Return the slice of a global batch that a data-parallel rank reads as its micro-batch number `micro_batch`."""
    start = (micro_batch * dp_size + dp_rank) * micro_batch_size
    return sample_ids[start : start + micro_batch_size]
