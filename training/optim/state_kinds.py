"""The kinds of optimizer state: a checkpoint saves each kind in its own way.

Nothing is saved by guessing. The state is declared; a run whose optimizer keeps anything else does not start.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from errors import UserError


class StateKind(Enum):
    """How an entry of an optimizer's state relates to its parameter."""

    elementwise = "elementwise"  # one value for each element
    scalar = "scalar"  # a tensor of one value, the same for all parameters
    number = "number"  # the same, as a Python number
    blockwise = "blockwise"  # an index into a table for each element; the elements of a block share a scale
    scales = "scales"  # one for each such block
    table = "table"  # the table of a blockwise entry, the same for all parameters: built again, not saved


BLOCK_SIZE = 256  # elements of a partition that share a scale (bitsandbytes)


def count_blocks(num_elements: int) -> int:
    """Return the number of blocks of a partition; the last may be partial."""
    return -(-num_elements // BLOCK_SIZE)


@dataclass(frozen=True)
class StateTensor:
    """One entry of an optimizer's state for a parameter.

    dtype: None for a Python number. scales, table: of a blockwise entry, the names of the entries with its scales and
    its table. build_table: builds a table.
    """

    kind: StateKind
    dtype: torch.dtype | None = torch.float32
    scales: str = ""
    table: str = ""
    build_table: Callable[[], torch.Tensor] | None = None

    @property
    def bytes_per_parameter(self) -> float:
        if self.dtype is None:
            return 0
        values_per_element = {StateKind.elementwise: 1, StateKind.blockwise: 1, StateKind.scales: 1 / BLOCK_SIZE}
        return self.dtype.itemsize * values_per_element.get(self.kind, 0)

    def describes(self, value: Any, weights: torch.Tensor) -> bool:
        """Returns whether `value`, in an optimizer's state for `weights`, has the dtype and shape of this blockwise
        entry, or of its scales or table."""
        if not torch.is_tensor(value) or value.dtype is not self.dtype:
            return False
        if self.kind is StateKind.blockwise:
            return value.shape == weights.shape
        size = {StateKind.scales: count_blocks(weights.numel()), StateKind.table: 256}.get(self.kind)
        return value.ndim == 1 and value.numel() == size

    def __str__(self) -> str:
        is_usual = self.dtype in (None, torch.float32)
        return self.kind.value if is_usual else f"{self.kind.value}, {str(self.dtype).removeprefix('torch.')}"


DeclaredState = Mapping[str, StateTensor]  # by the names in the optimizer's state


def describe_kept(value: Any, weights: torch.Tensor) -> StateTensor | str:
    """Return the kind and dtype of `value`, an entry of an optimizer's state for `weights`; a description in words
    where it has none of the kinds."""
    if isinstance(value, int | float):
        return StateTensor(StateKind.number, None)
    if not torch.is_tensor(value):
        return type(value).__name__
    if value.shape == weights.shape:
        return StateTensor(StateKind.elementwise, value.dtype)
    return StateTensor(StateKind.scalar, value.dtype) if value.ndim == 0 else f"of shape {list(value.shape)}"


def check_state(weights: torch.Tensor, state: Mapping[str, Any], declared: DeclaredState) -> None:
    """Check `state`, an optimizer's state for `weights`. Raises UserError when it differs from the declaration."""
    found = {
        name: str(
            declared[name]
            if name in declared and declared[name].describes(value, weights)
            else describe_kept(value, weights)
        )
        for name, value in state.items()
        if value is not None
    }
    expected = {name: str(kept) for name, kept in declared.items()}
    if found != expected:
        raise UserError(
            f"for each parameter the optimizer keeps {_list_words(found)}, but a checkpoint saves "
            f"{_list_words(expected)}; install the versions that this project is made for (pip install -r "
            "requirements.txt)"
        )


def _list_words(kept: Mapping[str, str]) -> str:
    return ", ".join(f"{name} ({words})" for name, words in sorted(kept.items())) or "nothing"
