"""The micro-batch that costs are counted for."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class MicroBatchShape:
    """Rows of `seq_length` tokens, whose activations have `dtype`. is_packed: whether a row has several documents."""

    rows: int
    seq_length: int
    dtype: torch.dtype
    is_packed: bool = False

    @property
    def tokens(self) -> int:
        return self.rows * self.seq_length

    def split(self, num_parts: int) -> MicroBatchShape:
        """Return the shape that a rank has when `num_parts` ranks share each sequence."""
        return dataclasses.replace(self, seq_length=self.seq_length // num_parts)
