"""The options of the communicator of a pipeline's transfers."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

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
