"""Totals of a step's global batch: tokens, targets, documents, samples."""

from dataclasses import dataclass

import numpy as np

from data.loading.row_source import RowSource
from data.options import MeanOver
from data.sample import IGNORE_INDEX


@dataclass(frozen=True)
class StepTotals:
    """Totals of a global batch, over all of its micro-batches and replicas.

    num_tokens: without padding.
    num_targets: tokens that are predicted, counted after the shift.
    num_documents: parts of rows that attend to themselves alone; as many as rows where nothing is packed.
    num_samples: documents, or the groups of them that stay together, such as pairs.
    most_documents: an upper bound of those in any micro-batch; 0 if unknown, since a user-defined collator sets
        positions.
    longest_document: in tokens, including the padding after it; 0 if unknown.
    """

    num_tokens: int
    num_targets: int
    num_documents: int
    num_samples: int
    most_documents: int = 0
    longest_document: int = 0

    def count_terms(self, mean_over: MeanOver) -> int:
        """Return the number of terms that the loss is a mean over."""
        return self.num_samples if mean_over is MeanOver.samples else self.num_targets


@dataclass(frozen=True)
class BatchShape:
    """The shape of a micro-batch. rows: how many it has. seq_length: their length with padding."""

    rows: int
    seq_length: int


def compute_step_totals(
    rows: RowSource, row_ids: np.ndarray, group_size: int, shape: BatchShape | None = None
) -> StepTotals:
    """Return the totals of a global batch of these rows, from the row index alone: any rank with the folder can call
    it.

    rows: may have been opened to read neither inputs nor labels. group_size: documents that stay together. shape: None
    where positions do not mark where documents begin.
    """
    return StepTotals(
        num_tokens=int(rows.lengths[row_ids].sum(dtype=np.int64)),
        num_targets=int(rows.num_targets[row_ids].sum(dtype=np.int64)),
        num_documents=rows.count_pieces(row_ids),
        num_samples=rows.count_pieces(row_ids) // group_size,
        most_documents=0 if shape is None else bound_documents(rows.piece_counts(row_ids), shape.rows),
        longest_document=0 if shape is None else rows.longest_piece(row_ids, shape.seq_length),
    )


def count_further(rows: RowSource, row_ids: np.ndarray, num_depths: int) -> tuple[int, ...]:
    """Return the targets of each further depth in a global batch of these rows. rows: opened to read labels.

    A target at depth k is one of the next token that has k tokens of its document before the one it is predicted from.
    """
    counts = np.zeros(num_depths, np.int64)
    for row in row_ids if num_depths else ():
        is_target, documents = rows.labels(row)[1:] != IGNORE_INDEX, rows.segment_ids(row)
        for depth in range(1, 1 + num_depths):
            counts[depth - 1] += np.count_nonzero(is_target[depth:] & (documents[depth:-1] == documents[: -1 - depth]))
    return tuple(counts.tolist())


def bound_documents(counts: np.ndarray, num_rows: int) -> int:
    """Return the most documents that any `num_rows` of these rows hold; a row of padding counts as one.

    counts: documents of each row.
    """
    return int(np.sort(counts)[-num_rows:].sum(dtype=np.int64)) + max(0, num_rows - len(counts))
