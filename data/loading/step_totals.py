"""A step's global batch in numbers."""

from dataclasses import dataclass

import numpy as np

from data.options import MeanOver
from data.storage.rows import Rows


@dataclass(frozen=True)
class StepTotals:
    """Totals of a global batch, over all of its micro-batches and replicas.

    num_tokens: without padding.
    num_targets: tokens that are predicted, so counted after the shift.
    num_documents: what shares a row without being seen by the rest of it; as many as rows where nothing is packed.
    num_samples: what `global_batch_size` counts: rows, or the groups of rows that stay together.
    most_documents: in any micro-batch, or more; 0 where nobody knows, because a user-defined collator sets positions.
    longest_document: in tokens, the padding behind it included.
    """

    num_tokens: int
    num_targets: int
    num_documents: int
    num_samples: int
    most_documents: int = 0
    longest_document: int = 0

    def count_terms(self, mean_over: MeanOver) -> int:
        """What the loss is a mean over."""
        return self.num_samples if mean_over is MeanOver.samples else self.num_targets


@dataclass(frozen=True)
class BatchShape:
    """rows: of a micro-batch. seq_length: of its rows, padding included."""

    rows: int
    seq_length: int


def compute_step_totals(
    rows: Rows, row_ids: np.ndarray, group_size: int, shape: BatchShape | None = None
) -> StepTotals:
    """The totals of a global batch of these rows: a function of their lengths, so any rank with the folder can call it.

    rows: may have been opened to read neither inputs nor labels. shape: None where positions do not say where the
    documents of these rows begin.
    """
    return StepTotals(
        num_tokens=int(rows.lengths[row_ids].sum(dtype=np.int64)),
        num_targets=int(rows.num_targets[row_ids].sum(dtype=np.int64)),
        num_documents=rows.count_pieces(row_ids),
        num_samples=len(row_ids) // group_size,
        most_documents=0 if shape is None else bound_documents(rows.piece_counts(row_ids), shape.rows),
        longest_document=0 if shape is None else rows.longest_piece(row_ids, shape.seq_length),
    )


def bound_documents(counts: np.ndarray, num_rows: int) -> int:
    """The most documents that `num_rows` rows can hold, whichever they are; a row of padding counts as one.

    counts: of each row that there is.
    """
    return int(np.sort(counts)[-num_rows:].sum(dtype=np.int64)) + max(0, num_rows - len(counts))
