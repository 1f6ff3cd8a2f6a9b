"""What an optimizer keeps beside the weights, tensor by tensor: a checkpoint saves each kind in its own way.

Nothing is saved by guessing. What is kept is declared; a run whose optimizer keeps something else does not start.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from errors import UserError


class StateKind(Enum):
    """How what an optimizer keeps relates to the parameter."""

    elementwise = "elementwise"  # one value for each element
    scalar = "scalar"  # a tensor of one value, the same for all parameters
    number = "number"  # the same, as a Python number
    blockwise = "blockwise"  # an index into a table for each element; the elements of a block share a scale
    scales = "scales"  # of such blocks
    table = "table"  # what the indices are into, the same for all parameters: made anew, not saved


BLOCK_SIZE = 256  # elements of a partition that share a scale (bitsandbytes)


def count_blocks(num_elements: int) -> int:
    return -(-num_elements // BLOCK_SIZE)


@dataclass(frozen=True)
class StateTensor:
    """One of the things that an optimizer keeps for a parameter. dtype: None of a Python number. scales, table: the
    names of those of a blockwise one. build_table: makes a table."""

    kind: StateKind
    dtype: torch.dtype | None = torch.float32
    scales: str = ""
    table: str = ""
    build_table: Callable[[], torch.Tensor] | None = None

    @property
    def bytes_per_parameter(self) -> float:
        if self.dtype is None:
            return 0
        of_kind = {StateKind.elementwise: 1, StateKind.blockwise: 1, StateKind.scales: 1 / BLOCK_SIZE}
        return self.dtype.itemsize * of_kind.get(self.kind, 0)

    def describes(self, value: Any, weights: torch.Tensor) -> bool:
        """Whether what an optimizer keeps for `weights` is in blocks as it says."""
        if not torch.is_tensor(value) or value.dtype is not self.dtype:
            return False
        if self.kind is StateKind.blockwise:
            return value.shape == weights.shape
        size = {StateKind.scales: count_blocks(weights.numel()), StateKind.table: 256}.get(self.kind)
        return value.ndim == 1 and value.numel() == size

    def __str__(self) -> str:
        is_usual = self.dtype in (None, torch.float32)
        return self.kind.value if is_usual else f"{self.kind.value}, {str(self.dtype).removeprefix('torch.')}"


DeclaredState = Mapping[str, StateTensor]  # by the names that an optimizer gives to what it keeps


def describe_kept(value: Any, weights: torch.Tensor) -> StateTensor | str:
    """What `value`, which an optimizer keeps for `weights`, is; in words where it is of no kind."""
    if isinstance(value, int | float):
        return StateTensor(StateKind.number, None)
    if not torch.is_tensor(value):
        return type(value).__name__
    if value.shape == weights.shape:
        return StateTensor(StateKind.elementwise, value.dtype)
    return StateTensor(StateKind.scalar, value.dtype) if value.ndim == 0 else f"of shape {list(value.shape)}"


def check_state(weights: torch.Tensor, state: Mapping[str, Any], declared: DeclaredState) -> None:
    """Raises UserError when `state`, which an optimizer keeps for `weights`, is not what is declared."""
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
