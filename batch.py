"""The parts of a micro-batch, by name, as they cross between data, models and training.

B rows of a micro-batch, T tokens of this rank's part of each sequence, W of the whole sequence (T and W are one number
for all ranks and micro-batches of a step), N targets, D documents. Nothing here can be indexed or iterated: a part has
a name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Self

import torch
from torch import Tensor

IGNORE_INDEX = -100  # the target of a position that nothing is predicted from
Columns = Mapping[str, Tensor]
Change = Callable[[Tensor], Tensor]


class Per(Enum):
    """The unit for which a column has one value. It decides how ranks that share a sequence get their part of a
    column, and what fills a micro-batch."""

    position = auto()  # of whole sequences, [B, W]: each rank takes its part of each sequence
    target = auto()  # of this rank's targets, in their order, [N, ...]: no padding
    document = auto()  # of the documents of all rows, in their order, [D, ...]: whole on each rank, no padding
    row = auto()  # [B, ...]: whole on each rank; a row that only fills the micro-batch has the padding
    batch = auto()  # of the micro-batch: whole on each rank


class Source(Enum):
    """Where the values of a column are read."""

    record = auto()  # in the tokenized folder, made of the records
    scored = auto()  # next to the tokens, where a model has left them once (`data/storage/scores.py`)
    first_pass = auto()  # nowhere: a pass before each step leaves them with the loss


class Side(Enum):
    """Which stage reads a column."""

    first_stage = auto()
    loss = auto()


@dataclass(frozen=True)
class Column:
    """A tensor that travels with a micro-batch besides tokens and targets, and is found by its name."""

    name: str
    dtype: torch.dtype
    per: Per
    source: Source = Source.record
    side: Side = Side.loss
    padding: float = 0  # the value of what only fills a micro-batch
    shape: tuple[int, ...] = ()  # of one value of a scored column; others show it when they are read


class _Tensors(ABC):
    """Tensors by names, which move and are pinned together."""

    def to(self, device: torch.device) -> Self:
        """Return a copy on a device. The host does not wait for copies of pinned tensors."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Self:
        """Return a copy in pinned memory; torch's loader calls it."""
        return self._map(lambda tensor: tensor.pin_memory())

    @abstractmethod
    def _map(self, change: Change) -> Self:
        """Return a copy whose tensors are changed."""


def _map_columns(columns: Columns, change: Change) -> Columns:
    return {name: change(tensor) for name, tensor in columns.items()}


@dataclass(frozen=True, eq=False)
class Inputs(_Tensors):
    """The half of a micro-batch that the first layer reads."""

    # int64 [B, T]. Rows are padded on the right; a causal model needs no mask for that.
    input_ids: Tensor
    # int64 [B, W]. Positions restart at each document of a packed row; in padding they go on from the last document.
    position_ids: Tensor
    # int32 [B, W]. The documents of a row are numbered from 1, and padding has 0.
    segment_ids: Tensor
    # The columns that the first stage reads, by their names.
    columns: Columns = field(default_factory=dict)

    @property
    def activations(self) -> tuple[Tensor, ...]:
        """The argument of the first layer; between layers hidden states take the place of `input_ids`."""
        return self.input_ids, self.position_ids, self.segment_ids, *self.columns.values()

    def _map(self, change: Change) -> Inputs:
        ids, positions, segments = change(self.input_ids), change(self.position_ids), change(self.segment_ids)
        return Inputs(ids, positions, segments, _map_columns(self.columns, change))


@dataclass(frozen=True, eq=False)
class Targets(_Tensors):
    """The half of a micro-batch that a loss compares the outputs with."""

    # int64 [B, T]. These are the shifted labels: each position has the token that is predicted from it, and
    # `IGNORE_INDEX` if there is none. If documents are scored as a whole, the last token of each document has its
    # number in the micro-batch, counted from 0.
    ids: Tensor
    # int64 [N]. These are the places of the targets in the flattened `ids`. To find them on a GPU, the host would have
    # to wait for all queued work, since N is a size.
    indices: Tensor
    # float64 scalar. The loss of a micro-batch is the sum of its terms over it. In training it is the number of terms
    # of the global batch / (replicas x ranks that share a sequence x micro-batches), so that the mean over all of these
    # is the exact loss of the global batch. In evaluation it is 1, and the loss is a sum.
    denominator: Tensor
    # The columns that the loss reads, by their names.
    columns: Columns = field(default_factory=dict)
    # The targets of each further depth: at depth k a position has the token that comes k positions after its target, in
    # the same document.
    further: tuple[Targets, ...] = ()

    @classmethod
    def find(cls, ids: Tensor, denominator: Tensor, **others: Any) -> Targets:
        """Return targets with the indices that `ids` has targets at. others: the other fields."""
        return cls(ids, find_indices(ids), denominator, **others)

    def _map(self, change: Change) -> Targets:
        ids, indices, denominator = change(self.ids), change(self.indices), change(self.denominator)
        further = tuple(each._map(change) for each in self.further)
        return Targets(ids, indices, denominator, _map_columns(self.columns, change), further)


def find_indices(ids: Tensor) -> Tensor:
    """Return where the flattened target ids [B, T] are no `IGNORE_INDEX`, int64 [N]."""
    return (ids.flatten() != IGNORE_INDEX).nonzero().squeeze(1)


@dataclass(frozen=True, eq=False)
class Batch(_Tensors):
    """A micro-batch as a rank has it: what it does not read is None."""

    inputs: Inputs | None
    targets: Targets | None

    def _map(self, change: Change) -> Batch:
        return Batch(self.inputs and self.inputs._map(change), self.targets and self.targets._map(change))
