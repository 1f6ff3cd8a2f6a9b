"""The cost of reading the weights of a model, found before any is read: memory of each host, and time."""

from __future__ import annotations

import bisect
import itertools
import os
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import console
from errors import UserError
from models.adapters.adapter import Adapter
from models.layers.frozen import count_stack_bytes
from models.sharding.expert_parallel import find_own_experts
from models.weights.source import WeightSource
from training.distributed.host_memory import measure_available_memory
from training.distributed.ranks import raise_together
from training.pipeline.placement import StageLayer
from training.pipeline.stage_ranks import StageRanks

LEAST_BYTES = 4e9  # that a host reads; less takes no time worth a line
_SAMPLES, _SAMPLE_BYTES = 16, 2**23  # of the files, by which their rate is measured


@dataclass(frozen=True)
class Share:
    """The part of one rank in what its host reads. host: the host's name. layers: the elements of each of the rank's
    layers, by the layer's number in the model. held: bytes of the host's memory that the rank takes while it reads
    the layer that takes most; on a CPU also those of all its weights. available: bytes of the host's memory that are
    free."""

    host: str
    layers: Mapping[int, int]
    held: int
    available: int


def check_reading(
    layers: Sequence[StageLayer],
    source: WeightSource,
    ranks: StageRanks,
    adapter: Adapter | None,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Check that hosts have the memory that reading takes, and state how long it takes where that is worth a line. All
    ranks call it, before any of them reads.

    layers: of this rank, with its experts alone, on the meta device. source: of the weights. ranks: those of this
    rank's stage. adapter: the run's; None without one. dtype, device: of the weights in memory. Raises UserError,
    together on all ranks.
    """
    elements = {layer.index: sum(each.numel() for each in layer.module.parameters()) for layer in layers}
    largest = max(layers, key=lambda layer: elements[layer.index], default=None)
    held, mistake = 0, None
    try:
        held = 0 if largest is None else _count_held(largest, source, ranks, adapter)
    except UserError as error:  # in a file that no other rank may have opened
        mistake = error
    if device.type == "cpu":
        held += sum(_count_weights(layer, adapter, dtype) for layer in layers)
    shares: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shares, Share(socket.gethostname(), elements, held, measure_available_memory()))
    raise_together(mistake or find_lack(shares))
    num_bytes = count_read(shares, sum(file.stat().st_size for file in source.files()))
    if ranks.rank == 0 and num_bytes >= LEAST_BYTES:
        rate = measure_rate(source.files())
        console.say(
            f"weights: a host reads {num_bytes / 1e9:,.0f} GB, in about {num_bytes / rate / 60:,.1f} min at the "
            f"{rate / 1e9:.2f} GB/s of samples of the files"
        )


def _count_held(layer: StageLayer, source: WeightSource, ranks: StageRanks, adapter: Adapter | None) -> int:
    """Return the bytes of the host's memory that a layer takes while it is read."""
    kept = () if adapter is None or adapter.kept is None else adapter.list_frozen(layer.module, layer.spec)
    experts = find_own_experts(layer.module, ranks.expert_parallel)
    held = source.count_held(layer.index, replace(layer.spec, experts=experts, kept=frozenset(kept)))
    return held + _count_quantized(layer, kept, adapter)


def _count_weights(layer: StageLayer, adapter: Adapter | None, dtype: torch.dtype) -> int:
    """Return the bytes of a layer's weights as the run holds them."""
    quantized = () if adapter is None else adapter.list_frozen(layer.module, layer.spec)
    others = (each.numel() for name, each in layer.module.named_parameters() if name not in quantized)
    return sum(others) * dtype.itemsize + _count_quantized(layer, quantized, adapter)


def _count_quantized(layer: StageLayer, names: Iterable[str], adapter: Adapter | None) -> int:
    form = None if adapter is None else adapter.form
    return 0 if form is None else sum(count_stack_bytes(form, layer.module.get_parameter(name).shape) for name in names)


def find_lack(shares: Sequence[Share]) -> UserError | None:
    """Return the error for the first host whose memory does not suffice; None where all have enough. shares: of all
    ranks."""
    for host in dict.fromkeys(share.host for share in shares):
        own = [share for share in shares if share.host == host]
        needed, available = sum(share.held for share in own), min(share.available for share in own)
        if needed > available:
            return UserError(
                f"reading the weights takes {needed / 2**30:,.1f} GiB of memory on {host}, and "
                f"{available / 2**30:,.1f} GiB are available; free some, or start fewer ranks on a host"
            )
    return None


def count_read(shares: Sequence[Share], num_bytes: int) -> float:
    """Return the bytes that the host reads which reads most: ranks that read the same layer share what is cached.

    num_bytes: of all files.
    """
    sizes: dict[int, int] = {}
    for share in shares:
        for layer, elements in share.layers.items():
            sizes[layer] = max(elements, sizes.get(layer, 0))
    read = [
        sum(sizes[layer] for layer in {layer for share in shares if share.host == host for layer in share.layers})
        for host in {share.host for share in shares}
    ]
    return num_bytes * max(read) / max(1, sum(sizes.values()))


def measure_rate(files: Sequence[Path]) -> float:
    """Return the bytes per second at which this process reads samples, spread evenly over the files, of which there is
    one at least. Raises OSError."""
    ends = list(itertools.accumulate(file.stat().st_size for file in files))
    read, start = 0, time.perf_counter()
    for number in range(_SAMPLES):
        place = ends[-1] * number // _SAMPLES
        chosen = bisect.bisect_right(ends, place)
        with open(files[chosen], "rb", buffering=0) as stream:
            stream.seek(place - ends[chosen], os.SEEK_END)
            read += len(stream.read(_SAMPLE_BYTES))
    return read / (time.perf_counter() - start)
