"""ZeRO-3: the weights of a layer cut into parts, one a replica, and put together where all of them are needed.

DeepSpeed's hooks put a layer together for its passes. What is read of a parameter between them is its part: its shape
and number of elements are what the functions here say.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from deepspeed.runtime.zero.partition_parameters import GatheredParameters, Init


@dataclass(frozen=True)
class WeightSharding:
    """Where a rank's part of the weights is. on_host: in the host's memory, pinned or not; else on its card."""

    on_host: bool = False
    pins: bool = False


def shard_weights(module: torch.nn.Module, dtype: torch.dtype, sharding: WeightSharding) -> None:
    """Leaves on each rank its part of the parameters of `module`, which all ranks have loaded. All ranks call it."""
    host = {"remote_device": "cpu", "pin_memory": sharding.pins} if sharding.on_host else {}
    Init(module=module, dtype=dtype, mem_efficient_linear=False, **host)


@contextmanager
def whole_weights(module: torch.nn.Module, changes: bool = False) -> Iterator[None]:
    """Within it the parameters of `module` are whole on each rank. All ranks call it, for one layer at a time.

    changes: what is written to them within stays, and is the same on all ranks.
    """
    with whole_parameters(module.parameters(), changes):
        yield


@contextmanager
def whole_parameters(tensors: Iterable[torch.Tensor], changes: bool = False) -> Iterator[None]:
    """The same of some parameters. Other tensors are whole as they are."""
    sharded = [tensor for tensor in tensors if is_sharded(tensor)]
    with GatheredParameters(sharded, modifier_rank=0 if changes else None, enabled=bool(sharded)):
        yield


def is_sharded(parameter: torch.Tensor) -> bool:
    return hasattr(parameter, "ds_tensor")


def whole_shape(parameter: torch.Tensor) -> torch.Size:
    """Of the parameter before it was cut over replicas."""
    return parameter.ds_shape if is_sharded(parameter) else parameter.shape  # type: ignore[attr-defined]
