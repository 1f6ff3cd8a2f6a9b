"""How long the rows of a run's steps really are, for what is foreseen of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.options import PadTo
from data.order import GlobalOrder
from data.storage.rows import RowPlan, Rows, list_rows

PAD_MULTIPLE = 8
_MOST_STEPS, _MOST_ROWS = 256, 2**24  # that are looked at: an instant


@dataclass(frozen=True)
class RowLengths:
    """Tokens of a row. longest: with padding, at most. padded: with padding, on average over the steps. filled:
    without."""

    longest: int
    padded: int
    filled: float


def compute_seq_length(lengths: np.ndarray, pad_to: PadTo, max_seq_length: int, parts: int = 1) -> int:
    """T of a step whose rows have these lengths. parts: equal ones that T can be cut into, as max_seq_length can."""
    if PadTo(pad_to) is PadTo.max_seq_length:
        return max_seq_length
    multiple = math.lcm(PAD_MULTIPLE, parts)
    return min(-(-int(lengths.max()) // multiple) * multiple, max_seq_length)


def measure_rows(
    path: Path, plan: RowPlan, order: GlobalOrder, steps: range, pad_to: PadTo, parts: int = 1
) -> RowLengths:
    """Of so many steps of the run, evenly chosen; the longest of all rows, where they are few enough to look at all.

    path: the tokenized folder of `train_file`. parts: see `compute_seq_length`.
    """
    rows = Rows(path, plan, reads_inputs=False, reads_labels=False)
    chosen = np.unique(np.linspace(steps.start, max(steps.start, steps.stop - 1), _MOST_STEPS, dtype=int)).tolist()
    of_steps = [rows.lengths[list_rows(order.sample_ids(step), plan.group_size)] for step in chosen]
    padded = [compute_seq_length(lengths, pad_to, plan.max_seq_length, parts) for lengths in of_steps]
    can_look = len(rows) <= _MOST_ROWS
    return RowLengths(
        longest=compute_seq_length(rows.lengths, pad_to, plan.max_seq_length, parts)
        if can_look
        else plan.max_seq_length,
        padded=round(float(np.mean(padded))),
        filled=float(np.mean([lengths.mean() for lengths in of_steps])),
    )
