"""The columns that travel with a micro-batch (`batch.py`), and where their values are read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from batch import Column, Per, Side, find_indices
from data.collator import number_targets
from data.loading.row_source import RowSource
from data.storage.rows import Rows
from data.storage.scores import Scores


@dataclass(frozen=True)
class ReadRows:
    """The rows of a micro-batch, as the values of a column are read for them."""

    source: RowSource
    ids: np.ndarray  # int64, of the rows in `source`; fewer than B where the micro-batch is filled
    whole: Tensor  # int64 [B, W], the sequences that ranks share: input ids on the first stage, targets at the loss
    take_part: Callable[[Tensor], Tensor]  # returns this rank's part of whole sequences

    @property
    def rows(self) -> Rows:
        """The rows in a tokenized folder. A stream has no columns that are read of samples."""
        assert isinstance(self.source, Rows)
        return self.source

    def number_samples(self) -> np.ndarray:
        """Return the number of each document's sample in the folder, int64 [D]."""
        return self.rows.list_samples(self.ids)

    def number_targets(self) -> np.ndarray:
        """Return the numbers of this rank's targets, row by row over the folder, int64 [N]."""
        return self._take_numbers(self.rows.first_targets(self.ids))

    def count_targets(self) -> np.ndarray:
        """Return the number of targets of each document, on all ranks that share it, int64 [D]."""
        return self.rows.count_targets(self.ids)

    def find_documents(self) -> np.ndarray:
        """Return the document of each of this rank's targets, counted from 0 over the rows, int64 [N]."""
        row_counts, counts = self.rows.num_targets[self.ids], self.count_targets()
        documents = np.repeat(np.arange(len(counts)), counts)
        return documents[self._take_numbers(np.cumsum(row_counts, dtype=np.int64) - row_counts)]

    def _take_numbers(self, first: np.ndarray) -> np.ndarray:
        """Return the numbers of this rank's targets, counted within each row from `first`, int64 [N]."""
        numbers = number_targets(self.whole, first)
        return self.take_part(numbers).flatten()[find_indices(self.take_part(self.whole))].numpy()


@dataclass(frozen=True)
class ReadColumn:
    """A column that a loader reads. read: returns its values: of `Per.row` and `Per.document` for `ids` alone, of
    `Per.target` for the targets of this rank's part, of the other kinds for all rows."""

    column: Column
    read: Callable[[ReadRows], np.ndarray | Tensor]

    def load(self, rows: ReadRows) -> Tensor:
        """Return the column of a micro-batch, as `Per` says."""
        values = torch.as_tensor(self.read(rows)).to(self.column.dtype)
        if self.column.per is Per.position:
            return rows.take_part(values)
        if self.column.per is Per.row and len(values) < len(rows.whole):
            missing = len(rows.whole) - len(values)
            return torch.cat([values, values.new_full((missing, *values.shape[1:]), self.column.padding)])
        return values


class ReadScores:
    """Reads a column that a model has scored, memory-mapped; see `data/storage/scores.py`."""

    def __init__(self, scores: Scores, column: Column) -> None:
        self._arguments = scores, column
        self._find_numbers = NUMBERS[column.per].read
        self._values = np.asarray(scores.map(scores.folder, column, "r"))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._arguments  # a worker process that is spawned opens it itself

    def __call__(self, rows: ReadRows) -> np.ndarray:
        return self._values[self._find_numbers(rows)]


def list_scored_columns(scores: Scores) -> list[ReadColumn]:
    """Return the columns of what a model has scored, as a loader reads them."""
    return [ReadColumn(column, ReadScores(scores, column)) for column in scores.columns]


def read_labels(rows: ReadRows) -> np.ndarray:
    """Return the labels of all documents, [D, K]; K is 0 for data without labels."""
    return rows.rows.sample_labels(rows.ids)


def read_whole(rows: ReadRows) -> Tensor:
    """Return the tokens of whole sequences."""
    return rows.whole


LABELS = ReadColumn(Column("labels", torch.float64, Per.document), read_labels)
# By which `document_log_probabilities` sums over the targets of each document
NUM_TARGETS = ReadColumn(Column("num_targets", torch.float64, Per.document), ReadRows.count_targets)
TARGET_DOCUMENTS = ReadColumn(Column("target_documents", torch.int64, Per.target), ReadRows.find_documents)
DOCUMENT_SUMS = (NUM_TARGETS, TARGET_DOCUMENTS)
# The numbers by which the values of a scored column are found
NUMBERS = {
    Per.document: ReadColumn(Column("numbers", torch.int64, Per.document), ReadRows.number_samples),
    Per.target: ReadColumn(Column("numbers", torch.int64, Per.target), ReadRows.number_targets),
}
WHOLE_IDS = ReadColumn(Column("whole_ids", torch.int64, Per.row, side=Side.first_stage), read_whole)
