"""Where DeepSpeed's ZeRO optimizers keep a parameter's fp32 weights and optimizer state.

Stages 1 and 2 concatenate the parameters of a group and split the result into equal parts, one per rank. Stage 3 splits
each parameter into equal parts, the last one padded, and concatenates those of a rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from training.engine.engine import Partition, PartitionSlice
from training.optim.state_kinds import DeclaredState


class PartitionView(ABC):
    """This rank's partitions of a ZeRO optimizer's state."""

    def __init__(self, optimizer: Any, kept: DeclaredState) -> None:
        self._optimizer, self._kept = optimizer, kept

    @abstractmethod
    def list_partitions(self) -> list[Partition]:
        """Return the partitions; empty without an optimizer."""

    @abstractmethod
    def find_slice(self, parameter: torch.nn.Parameter) -> PartitionSlice | None:
        """Return where this rank holds elements of a trained parameter; None where it holds none."""


def build_partition_view(optimizer: Any, kept: DeclaredState) -> PartitionView:
    """Build the view for an optimizer's ZeRO stage.

    optimizer: DeepSpeed's, around torch's; without one there are no partitions. kept: the declared state of torch's.
    """
    kind = Stage3Partitions if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3) else FlatPartitions
    return kind(optimizer, kept)


class FlatPartitions(PartitionView):
    """Partitions of stages 1 and 2: this rank's part of each parameter group."""

    def list_partitions(self) -> list[Partition]:
        """Return one partition per parameter group: the flat fp32 tensors that DeepSpeed's ZeRO and bf16 optimizers
        give to torch's."""
        inner = getattr(self._optimizer, "optimizer", None)
        if inner is None:
            return []
        flats = [flat for group in inner.param_groups for flat in group["params"][:1]]
        return [Partition(flat, inner.state.get(flat, {}), self._kept) for flat in flats]

    def find_slice(self, parameter: torch.nn.Parameter) -> PartitionSlice | None:
        mapping = parameter._hp_mapping  # type: ignore[attr-defined]
        if mapping is None:
            return None
        held = mapping.hp_fragment_address
        return PartitionSlice(
            mapping.param_group_index, held.start, held.numel, parameter_start=mapping.lp_fragment_address.start
        )


class Stage3Partitions(PartitionView):
    """Partitions of stage 3: for each sub-group of a parameter group, this rank's part of each parameter."""

    def list_partitions(self) -> list[Partition]:
        states = self._optimizer.optimizer.state
        flats = self._optimizer.fp32_partitioned_groups_flat
        return [Partition(flat, states.get(flat, {}), self._kept) for flat in flats]

    def find_slice(self, parameter: torch.nn.Parameter) -> PartitionSlice | None:
        number, start, _ = self._optimizer.grad_position[self._optimizer.get_param_id(parameter)]
        size = parameter.ds_tensor.ds_numel  # type: ignore[attr-defined]
        first = size * parameter.ds_zero_partition_rank  # type: ignore[attr-defined]
        length = min(size, parameter.ds_numel - first)  # type: ignore[attr-defined]
        return PartitionSlice(number, start, length, parameter_start=first) if length > 0 else None
