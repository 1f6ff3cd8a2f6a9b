"""Rows that micro-batches are made of: in a tokenized folder (`Rows`), or in memory (`RowBlock`)."""

from typing import Protocol

import numpy as np


class RowSource(Protocol):
    """Rows by their number; see `data/storage/rows.py`, whose methods these are. R rows."""

    @property
    def lengths(self) -> np.ndarray: ...  # [R]

    @property
    def num_targets(self) -> np.ndarray: ...  # [R]

    def piece_counts(self, rows: np.ndarray) -> np.ndarray: ...

    def count_pieces(self, rows: np.ndarray) -> int: ...

    def longest_piece(self, rows: np.ndarray, seq_length: int) -> int: ...

    def input_ids(self, row: int) -> np.ndarray: ...

    def position_ids(self, row: int) -> np.ndarray: ...

    def segment_ids(self, row: int) -> np.ndarray: ...

    def labels(self, row: int) -> np.ndarray: ...
