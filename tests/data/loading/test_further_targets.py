"""Targets of further tokens: those of the next token, later in the same document, and how many a global batch has."""

from __future__ import annotations

import numpy as np
import torch

from data.collator import defer_targets, pad_segments, shift_labels
from data.loading.step_totals import count_further
from data.sample import IGNORE_INDEX

DEPTHS = 3


class DrawnRows:
    """Rows of documents of 1 to 9 tokens, some of which are targets; the first token of a document never is."""

    def __init__(self, count: int) -> None:
        draw = np.random.default_rng(0)
        self.documents = [[int(length) for length in draw.integers(1, 10, draw.integers(1, 5))] for _ in range(count)]
        self._labels = [self._draw(draw, lengths) for lengths in self.documents]

    def _draw(self, draw: np.random.Generator, lengths: list[int]) -> np.ndarray:
        labels = draw.integers(1, 100, sum(lengths))
        labels[draw.random(len(labels)) < 0.3] = IGNORE_INDEX
        labels[np.cumsum([0, *lengths[:-1]])] = IGNORE_INDEX
        return labels

    def labels(self, row: int) -> np.ndarray:
        return self._labels[row]

    def segment_ids(self, row: int) -> np.ndarray:
        return np.repeat(np.arange(1, 1 + len(self.documents[row]), dtype=np.int32), self.documents[row])


def list_expected(rows: DrawnRows, row: int, depth: int) -> list[int]:
    """The target at each position, document by document."""
    targets, start = [], 0
    for length in rows.documents[row]:
        document = rows.labels(row)[start : start + length].tolist()
        targets += document[depth + 1 :] + [IGNORE_INDEX] * min(length, depth + 1)
        start += length
    return targets


def test_a_target_is_in_the_document_that_it_is_predicted_from() -> None:
    rows = DrawnRows(40)
    width = max(map(sum, rows.documents)) + 2
    labels = torch.full((40, width), IGNORE_INDEX)
    for row in range(40):
        labels[row, : len(rows.labels(row))] = torch.from_numpy(rows.labels(row))
    segment_ids = pad_segments([rows.segment_ids(row) for row in range(40)], (40, width))
    counts = count_further(rows, np.arange(40), DEPTHS)
    assert len(set(counts)) == DEPTHS and counts[-1] > 0
    for depth in range(1, 1 + DEPTHS):
        targets = defer_targets(shift_labels(labels), segment_ids, depth)
        for row in range(40):
            expected = list_expected(rows, row, depth)
            assert targets[row, : len(expected)].tolist() == expected
            assert (targets[row, len(expected) :] == IGNORE_INDEX).all()
        assert counts[depth - 1] == int((targets != IGNORE_INDEX).sum())


def test_no_depth_reads_nothing() -> None:
    assert count_further(DrawnRows(3), np.arange(3), 0) == ()
