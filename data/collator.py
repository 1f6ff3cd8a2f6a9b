"""From the rows of a micro-batch to tensors. A user-defined collator has the same two methods: they run on different
ranks, one where inputs are read, the other where labels are.

B rows of a micro-batch, T tokens of each; `shape` is (B, T), and a batch of an evaluation may have fewer rows than B.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from data.sample import IGNORE_INDEX
from errors import UserError

NumpyRows = Sequence[np.ndarray]  # int, one array per row, of its own length
Shape = tuple[int, int]


class Collator(Protocol):
    def collate_inputs(
        self, input_ids: NumpyRows, position_ids: NumpyRows, shape: Shape, pad_token_id: int
    ) -> tuple[Tensor, Tensor]:
        """Return input_ids and position_ids, int64 [B, T]. Positions that restart at 0 separate documents."""
        ...

    def collate_labels(self, labels: NumpyRows, shape: Shape) -> Tensor:
        """Return labels int64 [B, T], aligned with input_ids, -100 where nothing is trained, with all targets of the
        rows.

        The loader shifts them.
        """
        ...


@dataclass(frozen=True)
class PadRight:
    """Pads after the tokens: a causal model needs no mask for that."""

    def collate_inputs(
        self, input_ids: NumpyRows, position_ids: NumpyRows, shape: Shape, pad_token_id: int
    ) -> tuple[Tensor, Tensor]:
        return _pad(input_ids, shape, pad_token_id), _pad_positions(position_ids, shape)

    def collate_labels(self, labels: NumpyRows, shape: Shape) -> Tensor:
        return _pad(labels, shape, IGNORE_INDEX)


@dataclass(frozen=True)
class Checked:
    """A user-defined collator whose results are checked; `name` is what errors call it."""

    collator: Collator
    name: str

    def collate_inputs(
        self, input_ids: NumpyRows, position_ids: NumpyRows, shape: Shape, pad_token_id: int
    ) -> tuple[Tensor, Tensor]:
        ids, positions = self.collator.collate_inputs(input_ids, position_ids, shape, pad_token_id)
        self._check("input_ids", ids, shape)
        self._check("position_ids", positions, shape)
        return ids, positions

    def collate_labels(self, labels: NumpyRows, shape: Shape) -> Tensor:
        """Return the labels. Raises UserError when targets were lost or added: the loss is a mean over a number that
        was counted before."""
        collated = self.collator.collate_labels(labels, shape)
        self._check("labels", collated, shape)
        expected = sum(np.count_nonzero(row[1:] != IGNORE_INDEX) for row in labels)
        found = int((collated[:, 1:] != IGNORE_INDEX).sum())
        if found != expected:
            raise UserError(
                f"{self.name}: {found} targets in a micro-batch that had {expected}; "
                "the encoder decides which tokens carry loss"
            )
        return collated

    def _check(self, what: str, tensor: object, shape: Shape) -> None:
        if not isinstance(tensor, Tensor) or tensor.shape != shape or tensor.dtype != torch.int64:
            found = f"{tensor.dtype} {list(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise UserError(f"{self.name}: {what} must be a tensor torch.int64 {list(shape)}, not {found}")


def shift_labels(labels: Tensor) -> Tensor:
    """Return targets int64 [B, T] of labels [B, T]: at each position the next token, and -100 at the last."""
    return pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)


def defer_targets(targets: Tensor, segment_ids: Tensor, depth: int) -> Tensor:
    """Return at each position the target `depth` positions later, int64 [B, T], and -100 where that is one of another
    document. targets, segment_ids: [B, T], of whole rows."""
    later = pad(targets[:, depth:], (0, depth), value=IGNORE_INDEX)
    same = segment_ids == pad(segment_ids[:, depth:], (0, depth))
    return later.masked_fill(~same, IGNORE_INDEX)


def unshift_targets(targets: Tensor) -> Tensor:
    """Return the labels that `shift_labels` turns into these targets; the first, which nothing predicts, is -100."""
    return pad(targets[:, :-1], (1, 0), value=IGNORE_INDEX)


def number_documents(rows: NumpyRows, shape: Shape) -> Tensor:
    """Return int64 [B, T]: at the last token of each document its number in the micro-batch, from 0, else -100.

    rows: the document of each token in its row, from 1.
    """
    numbered = np.full(shape, IGNORE_INDEX, np.int64)
    number = 0
    for row, documents in zip(numbered, rows):
        ends = np.flatnonzero(np.diff(documents, append=0))
        row[ends] = np.arange(number, number + len(ends))
        number += len(ends)
    return torch.from_numpy(numbered)


def number_targets(targets: Tensor, first: np.ndarray) -> Tensor:
    """Return int64 [B, T]: at each target its number, counted within its row from `first` [<= B]; elsewhere any."""
    firsts = np.zeros(len(targets), np.int64)
    firsts[: len(first)] = first
    return (targets != IGNORE_INDEX).cumsum(dim=1) - 1 + torch.from_numpy(firsts)[:, None]


def pad_segments(rows: NumpyRows, shape: Shape) -> Tensor:
    """Return segment_ids, int32 [B, T], 0 for padding. rows: the document number of each token, from 1."""
    return _pad(rows, shape, 0, np.int32)


def _pad(rows: NumpyRows, shape: Shape, value: int, dtype: type[np.integer] = np.int64) -> Tensor:
    padded = np.full(shape, value, dtype)
    for row, tokens in zip(padded, rows):
        row[: len(tokens)] = tokens
    return torch.from_numpy(padded)  # [B, T]


def _pad_positions(rows: NumpyRows, shape: Shape) -> Tensor:
    """Padding continues the last document's positions, so that a batch without packed rows needs no mask at all."""
    padded = np.tile(np.arange(shape[1]), (shape[0], 1))
    for row, positions in zip(padded, rows):
        row -= len(positions) - 1 - positions[-1]
        row[: len(positions)] = positions
    return torch.from_numpy(padded)  # [B, T]
