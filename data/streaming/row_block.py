"""Rows in memory, as flat columns: what `Rows` reads from the disk, made of tokens that are never written to it.

N tokens, P pieces (what one row holds of one sample), R rows, T tokens of a row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from data.options import Packing
from data.sample import IGNORE_INDEX
from data.storage.packing import Pieces, concatenate, lay_singly, pack_best_fit
from data.storage.rows import RowPlan


@dataclass(frozen=True)
class RowBlock:
    """Rows, end to end. The first label of each piece is -100, and positions restart there."""

    tokens: np.ndarray  # int32 [N]
    token_labels: np.ndarray  # int32 [N]
    piece_lengths: np.ndarray  # int64 [P]
    offsets: np.ndarray  # int64 [R + 1], the first piece of each row

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @cached_property
    def starts(self) -> np.ndarray:
        """The first token of each row, int64 [R + 1]."""
        return np.concatenate([[0], np.cumsum(self.piece_lengths)])[self.offsets]

    @cached_property
    def lengths(self) -> np.ndarray:
        """The tokens of each row, int64 [R]."""
        return np.diff(self.starts)

    @cached_property
    def num_targets(self) -> np.ndarray:
        """The targets of each row, int64 [R]."""
        return np.diff(np.concatenate([[0], np.cumsum(self.token_labels != IGNORE_INDEX)])[self.starts])

    def piece_counts(self, rows: np.ndarray) -> np.ndarray:
        """Return the number of pieces of each row, int64 [len(rows)]."""
        return self.offsets[rows + 1] - self.offsets[rows]

    def count_pieces(self, rows: np.ndarray) -> int:
        """Return the number of pieces of the rows together."""
        return int(self.piece_counts(rows).sum())

    def longest_piece(self, rows: np.ndarray, seq_length: int) -> int:
        """Return the tokens of the longest piece of the rows, with the last one of each padded to `seq_length`."""
        padded = [self._pieces(row) for row in rows]
        return max(max(*pieces, pieces[-1] + seq_length - sum(pieces)) for pieces in padded)

    def input_ids(self, row: int) -> np.ndarray:
        """Return the tokens of the row, int32 [T]."""
        return self.tokens[self.starts[row] : self.starts[row + 1]]

    def labels(self, row: int) -> np.ndarray:
        """Return labels, int32 [T], -100 on the first token of each piece."""
        return self.token_labels[self.starts[row] : self.starts[row + 1]]

    def position_ids(self, row: int) -> np.ndarray:
        """Return positions, int64 [T], from 0 at each piece."""
        return np.concatenate([np.arange(length) for length in self._pieces(row)])

    def segment_ids(self, row: int) -> np.ndarray:
        """Return the piece of each token, int32 [T], counted from 1."""
        lengths = self._pieces(row)
        return np.repeat(np.arange(1, len(lengths) + 1, dtype=np.int32), lengths)

    def _pieces(self, row: int) -> list[int]:
        return self.piece_lengths[self.offsets[row] : self.offsets[row + 1]].tolist()

    def slice(self, start: int, stop: int) -> "RowBlock":
        """Return some of the rows, without copying them."""
        tokens = slice(self.starts[start], self.starts[stop])
        pieces = slice(self.offsets[start], self.offsets[stop])
        offsets = self.offsets[start : stop + 1] - self.offsets[start]
        return RowBlock(self.tokens[tokens], self.token_labels[tokens], self.piece_lengths[pieces], offsets)

    def take(self, rows: np.ndarray) -> "RowBlock":
        """Return the rows in another order."""
        return join_rows([self.slice(row, row + 1) for row in rows.tolist()])


def join_rows(blocks: Sequence[RowBlock]) -> RowBlock:
    """Return the rows of all blocks, in their order; at least one block."""
    counts = np.concatenate([np.diff(block.offsets) for block in blocks])
    return RowBlock(
        np.concatenate([block.tokens for block in blocks]),
        np.concatenate([block.token_labels for block in blocks]),
        np.concatenate([block.piece_lengths for block in blocks]),
        np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
    )


def lay_rows(columns: Mapping[str, np.ndarray], plan: RowPlan) -> RowBlock:
    """Return the rows that samples become. columns: of an `EncodedBatch`, at least one sample."""
    lengths = columns["length"].astype(np.int64)
    pieces = _choose_pieces(lengths, plan)
    sizes = pieces.stops - pieces.starts
    ends = np.cumsum(sizes)
    # the place of each token of the rows among the tokens of the samples
    firsts = (np.cumsum(lengths) - lengths)[pieces.sample_ids] + pieces.starts
    places = np.repeat(firsts - (ends - sizes), sizes) + np.arange(ends[-1])
    labels = columns["labels"][places]
    labels[ends - sizes] = IGNORE_INDEX
    return RowBlock(columns["input_ids"][places], labels, sizes, pieces.offsets)


def _choose_pieces(lengths: np.ndarray, plan: RowPlan) -> Pieces:
    sample_ids = np.arange(len(lengths))
    if plan.packing is Packing.BEST_FIT:
        return pack_best_fit(sample_ids, lengths, plan.max_seq_length)
    if plan.packing is Packing.CONCATENATE:
        return concatenate(sample_ids, lengths, plan.max_seq_length)
    return lay_singly(sample_ids, lengths)
