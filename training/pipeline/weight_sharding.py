"""ZeRO-3: the weights of a layer are sharded over the replicas, and gathered where all of them are needed.

DeepSpeed's hooks gather a layer for its passes. Between them a parameter is this rank's shard; the functions here give
its whole shape and values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from deepspeed.runtime.zero.partition_parameters import GatheredParameters, Init


@dataclass(frozen=True)
class WeightSharding:
    """Where a rank's shard of the weights is. on_host: in the host's memory, pinned or not; else on its GPU."""

    on_host: bool = False
    pins: bool = False


def shard_weights(module: torch.nn.Module, dtype: torch.dtype, sharding: WeightSharding) -> None:
    """Keep on each rank only its shard of the parameters of `module`, which all ranks have loaded. All ranks call
    it."""
    host = {"remote_device": "cpu", "pin_memory": sharding.pins} if sharding.on_host else {}
    Init(module=module, dtype=dtype, mem_efficient_linear=False, **host)


@contextmanager
def whole_weights(module: torch.nn.Module, changes: bool = False) -> Iterator[None]:
    """Gather the parameters of `module` on each rank inside the context. All ranks call it, for one layer at a time.

    changes: writes to them are kept; they are the same on all ranks.
    """
    with whole_parameters(module.parameters(), changes):
        yield


@contextmanager
def whole_parameters(tensors: Iterable[torch.Tensor], changes: bool = False) -> Iterator[None]:
    """Gather `tensors` as `whole_weights` does. Those that are not sharded stay as they are."""
    sharded = [tensor for tensor in tensors if is_sharded(tensor)]
    with GatheredParameters(sharded, modifier_rank=0 if changes else None, enabled=bool(sharded)):
        yield


def is_sharded(parameter: torch.Tensor) -> bool:
    """Returns whether ZeRO-3 shards the parameter."""
    return hasattr(parameter, "ds_tensor")


def whole_shape(parameter: torch.Tensor) -> torch.Size:
    """Return the shape of the whole parameter, also where this rank has a shard."""
    return parameter.ds_shape if is_sharded(parameter) else parameter.shape  # type: ignore[attr-defined]
