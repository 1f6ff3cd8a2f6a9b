"""The share of a GPU that transfers take: options of a pipeline's communicator, and multiprocessors left to all."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from training.distributed.topology import Layout

# Thread blocks of NCCL's kernel of an exchange. Each holds a multiprocessor from the launch, between two passes, until
# the other ranks have come as far. By default NCCL uses as many as could saturate the widest connection (up to 32). Not
# measured: on an H100 four should carry some 80 GB/s of NVLink.
MOST_CTAS = 4
_CHOSEN_BY_USER = ("NCCL_MAX_CTAS", "NCCL_MIN_CTAS", "NCCL_MAX_P2P_NCHANNELS", "NCCL_MIN_P2P_NCHANNELS")


def build_options(backend: str) -> Any | None:
    """Return `pg_options` for the process group of a pipeline's transfers.

    None for other backends than NCCL, for an NCCL without these options, and where a user has set the number of
    channels in NCCL's environment.
    """
    if (
        backend != dist.Backend.NCCL
        or not dist.is_nccl_available()
        or any(name in os.environ for name in _CHOSEN_BY_USER)
    ):
        return None
    options = dist.ProcessGroupNCCL.Options()
    if not hasattr(options, "config"):
        return None
    options.config.min_ctas, options.config.max_ctas = 1, MOST_CTAS
    return options


def count_spared(layout: Layout, is_ring: bool) -> int:
    """Return how many multiprocessors a kernel that stays on all the others until it is done should leave free:
    `MOST_CTAS` for each kind of transfer that is under way while layers run. These are between stages, around the rings
    of a shared sequence, and of gradients (at stage 3 weights too) between the ranks that have the same weights.

    Not bounded: NCCL chooses how many a ring and sums of gradients take, and they get through in more than one turn.
    What layers wait for (heads, experts, tensor parallelism) is never under way at the same time.
    """
    return MOST_CTAS * sum((layout.num_stages > 1, is_ring, layout.num_weight_replicas > 1))
