"""The work and the memory of a selection of keys, which a plan states by itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class SelectionCost:
    """The selection of one layer for a micro-batch. FLOPs are two a multiply-add, and of a forward pass alone: nothing
    flows back. A layer that reuses a selection has masks alone."""

    score_flops: int = 0  # of the scores of all heads and of their weighted sums, in fp32
    projection_flops: int = 0  # of the indexer's matrices
    score_bytes: int = 0  # while a chunk of queries is scored, at most
    selected_bytes: int = 0  # of the selected places
    mask_bytes: int = 0  # of the masks that attention keeps, in the dtype of activations
    num_chunks: int = 0  # of queries
    moved_bytes: int = 0  # through memory, by all chunks but the one that a run on the meta device has


class Selecting:
    """An attention module that may have an indexer, which no gradient flows through."""

    indexer: Any  # None in a layer that reuses an earlier one's selection
    is_selecting = False  # of this class: whether keys are being selected

    def count_selection(self, num_rows: int, length: int, itemsize: int) -> SelectionCost | None:
        """Return the cost of a selection for rows of `length` tokens, one document each; None where
        attention is dense. itemsize: bytes of an element of activations."""
        raise NotImplementedError


@contextmanager
def mark_selection() -> Iterator[None]:
    """Run what selects keys under this: no backward pass reads what it makes, so that
    `activation_checkpoint_mode=selective` keeps none of it."""
    Selecting.is_selecting = True
    try:
        yield
    finally:
        Selecting.is_selecting = False
