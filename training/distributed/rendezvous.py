"""Where ranks meet: the store of rank 0, a TCP server.

torch's own server listens on every interface of the host, whatever MASTER_ADDR is (2.13.0), and answers whoever
connects. A run on one host needs the loopback alone, so it starts the server on a socket that is bound to it. Under
torchrun the server is torchrun's.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.rendezvous import register_rendezvous_handler

from errors import UserError

LOOPBACK = "127.0.0.1"
_SCHEME = "ranks"
_servers: list[dist.TCPStore] = []  # at most one: that of rank 0, until its process group has it


def choose_init_method() -> str | None:
    """Return the `init_method` of the process group, and point MASTER_ADDR to the loopback where all ranks are on this
    host; None: torch's own, with the store of torchrun."""
    if is_kept_by_launcher():
        return None
    if _is_on_one_host():
        os.environ["MASTER_ADDR"] = LOOPBACK
    return f"{_SCHEME}://"


def is_kept_by_launcher() -> bool:
    """Return whether the launcher keeps the store, as torchrun does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _is_on_one_host() -> bool:
    environ = os.environ
    address = environ["MASTER_ADDR"]
    local_size = environ.get("LOCAL_SIZE") or environ.get("LOCAL_WORLD_SIZE")
    return local_size == environ["WORLD_SIZE"] or address == "localhost" or address.startswith("127.")


def serve() -> None:
    """Start the server on rank 0, before its process group; does nothing where there is one. Raises UserError where the
    port is in use."""
    if not _servers and not is_kept_by_launcher():
        _servers.append(_start_server())


def _start_server() -> dist.TCPStore:
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    with explain_used_port():
        listener = socket.create_server((LOOPBACK, port)).detach() if _is_on_one_host() else None
        return dist.TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener)


def connect(timeout: timedelta) -> dist.TCPStore:
    """Return a new connection to the store, once it is there. timeout: of this, and of each operation. Raises
    RuntimeError."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(address, port, timeout=timeout, wait_for_workers=False)


def _meet(url: str, timeout: timedelta = dist.default_pg_timeout, **_: Any) -> Iterator[tuple[dist.Store, int, int]]:
    rank, world_size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    if rank == 0:
        serve()
    yield _servers.pop() if rank == 0 else connect(timeout), rank, world_size


register_rendezvous_handler(_SCHEME, _meet)


@contextmanager
def explain_used_port() -> Iterator[None]:
    """Raise UserError where the block cannot listen on MASTER_PORT since another process does."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        if getattr(error, "errno", None) != errno.EADDRINUSE and "EADDRINUSE" not in str(error):
            raise
        raise UserError(
            f"port {os.environ['MASTER_PORT']} of this host is in use, perhaps by another run; give a free one: "
            "--master_port of deepspeed and torchrun, MASTER_PORT under srun"
        ) from None
