"""Measured row lengths of a run's steps, for its predictions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.options import PadTo
from data.order import GlobalOrder
from data.storage.rows import RowPlan, Rows, list_rows

PAD_MULTIPLE = 8
_MOST_STEPS, _MOST_ROWS = 256, 2**24  # that are read, which takes an instant


@dataclass(frozen=True)
class RowLengths:
    """Tokens of a row. longest: the most, with padding. padded: the mean over the steps, with padding. filled: the mean
    without."""

    longest: int
    padded: int
    filled: float


def compute_seq_length(lengths: np.ndarray, pad_to: PadTo, max_seq_length: int, parts: int = 1) -> int:
    """Return T of a step whose rows have these lengths, a multiple of `parts`, as max_seq_length must be."""
    if PadTo(pad_to) is PadTo.max_seq_length:
        return max_seq_length
    multiple = math.lcm(PAD_MULTIPLE, parts)
    return min(-(-int(lengths.max()) // multiple) * multiple, max_seq_length)


def measure_rows(
    path: Path, plan: RowPlan, order: GlobalOrder, steps: range, pad_to: PadTo, parts: int = 1
) -> RowLengths:
    """Measure the rows of up to `_MOST_STEPS` evenly spaced steps; `longest` is over all rows, or max_seq_length where
    they are more than `_MOST_ROWS`.

    path: the tokenized folder of `train_file`. parts: see `compute_seq_length`.
    """
    rows = Rows(path, plan, reads_inputs=False, reads_labels=False)
    chosen = np.unique(np.linspace(steps.start, max(steps.start, steps.stop - 1), _MOST_STEPS, dtype=int)).tolist()
    step_lengths = [rows.lengths[list_rows(order.sample_ids(step), plan.rows_per_group)] for step in chosen]
    padded = [compute_seq_length(lengths, pad_to, plan.max_seq_length, parts) for lengths in step_lengths]
    reads_all = len(rows) <= _MOST_ROWS
    return RowLengths(
        longest=compute_seq_length(rows.lengths, pad_to, plan.max_seq_length, parts)
        if reads_all
        else plan.max_seq_length,
        padded=round(float(np.mean(padded))),
        filled=float(np.mean([lengths.mean() for lengths in step_lengths])),
    )
