"""Ranks of one host meet where no other host can reach them; a port that is taken is named."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.workers import FORKSERVER, free_port, redirect_output

from errors import UserError


def start_ranks(function: Callable[..., None], world_size: int, log: Path, **environ: str) -> list[Any]:
    """`function(answers)` on each rank of a launcher that hosts no store."""
    answers = FORKSERVER.Queue()
    shared = {"WORLD_SIZE": str(world_size), "MASTER_PORT": str(free_port()), **environ}
    ranks = [
        FORKSERVER.Process(
            target=_run, args=(function, answers, {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}, log)
        )
        for rank in range(world_size)
    ]
    for rank in ranks:
        rank.start()
    found = [answers.get(timeout=100) for _ in ranks]
    for rank in ranks:
        rank.join()
    return found


def _run(function: Callable[..., None], answers: Any, environ: dict[str, str], log: Path) -> None:
    redirect_output(log)
    for name in ("LOCAL_SIZE", "LOCAL_WORLD_SIZE", "GLOO_SOCKET_IFNAME", "TORCHELASTIC_USE_AGENT_STORE"):
        os.environ.pop(name, None)
    os.environ.update(environ)
    function(answers)


def report_listeners(answers: Any) -> None:
    """Answers with the addresses on which this rank listens, once all ranks have joined and reduced something."""
    import torch
    import torch.distributed as dist

    from training.distributed.process import join_process_group, leave_process_group

    join_process_group()
    total = torch.ones(1)
    dist.all_reduce(total)
    listening = [each for each in psutil.Process().net_connections("inet") if each.status == psutil.CONN_LISTEN]
    dist.barrier()
    answers.put((int(total), sorted({each.laddr.ip for each in listening}), len(listening)))
    leave_process_group()


def own_address() -> str:
    """Returns an address of this host that others could reach; the loopback where it has none."""
    addresses = [entry for entries in psutil.net_if_addrs().values() for entry in entries]
    return next(
        (entry.address for entry in addresses if entry.family == socket.AF_INET and entry.address != "127.0.0.1"),
        "127.0.0.1",
    )


@pytest.mark.parametrize(
    "environ",
    [
        {"MASTER_ADDR": "127.0.0.1"},  # set by hand
        {"MASTER_ADDR": own_address(), "LOCAL_SIZE": "2"},  # a hostfile with one host
    ],
    ids=["loopback", "address"],
)
def test_on_one_host_ranks_listen_on_the_loopback_alone(environ: dict[str, str], tmp_path: Path) -> None:
    found = start_ranks(report_listeners, 2, tmp_path / "log", **environ)
    assert [(total, addresses) for total, addresses, _ in found] == [(2, ["127.0.0.1"])] * 2
    assert max(count for *_, count in found) >= 2  # rank 0's store and its end of gloo


def report_refusal(answers: Any) -> None:
    """Answers with the message of a rank that cannot listen."""
    from training.distributed.process import join_process_group

    try:
        join_process_group()
    except UserError as error:
        answers.put(str(error))


@pytest.mark.parametrize("local_size", ["1", "2"])
def test_a_port_in_use_names_the_option(local_size: str, tmp_path: Path) -> None:
    """With the store on the loopback, and with torch's own (the second rank is on another host)."""
    with socket.create_server(("", 0)) as taken:
        port = str(taken.getsockname()[1])
        environ = {"MASTER_ADDR": own_address(), "MASTER_PORT": port, "WORLD_SIZE": local_size, "LOCAL_SIZE": "1"}
        (message,) = start_ranks(report_refusal, 1, tmp_path / "log", **environ)
    assert message == (
        f"port {port} of this host is in use, perhaps by another run; give a free one: --master_port of deepspeed and "
        "torchrun, MASTER_PORT under srun"
    )
