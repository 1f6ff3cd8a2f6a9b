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
    """

    num_tokens: int
    num_targets: int
    num_documents: int
    num_samples: int

    def count_terms(self, mean_over: MeanOver) -> int:
        """What the loss is a mean over."""
        return self.num_samples if mean_over is MeanOver.samples else self.num_targets


def compute_step_totals(rows: Rows, row_ids: np.ndarray, group_size: int) -> StepTotals:
    """The totals of a global batch of these rows: a function of their lengths, so any rank with the folder can call it.

    rows: may have been opened to read neither inputs nor labels.
    """
    return StepTotals(
        num_tokens=int(rows.lengths[row_ids].sum(dtype=np.int64)),
        num_targets=int(rows.num_targets[row_ids].sum(dtype=np.int64)),
        num_documents=rows.count_pieces(row_ids),
        num_samples=len(row_ids) // group_size,
    )
