"""Ranks of one host meet where no other host can reach them; a port that is taken is named; hosts that wait for a rank
which has ended end too."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from datetime import timedelta
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


def meet(words: dict[int, str], start_minutes: float) -> None:
    """A rank of a run up to its process group. words: what a rank does before it joins."""
    from training.distributed import meeting, rendezvous
    from training.distributed.process import join_process_group, leave_process_group
    from training.distributed.ranks import exit_on_user_error, read_ranks

    ranks = read_ranks()
    word = words.get(ranks.rank, "")
    if "kill" in words.values() or "never start" in words.values():
        meeting._SECONDS_TO_TELL = 1.0  # they read nothing
    meeting.tell_other_hosts(ranks)
    with exit_on_user_error(ranks):
        if word == "fail early":
            raise UserError("torch: the version is wrong")
        meeting.watch_meeting(ranks, start_minutes)
        if word == "fail":
            raise UserError("train_file=x.jsonl: there is no such file")
        if word == "raise":
            raise RuntimeError("unexpected")
        if word == "kill":
            store = rendezvous.connect(timedelta(minutes=5))
            while not store.add(f"{meeting._BEATS}/{1 - ranks.rank}", 0):
                time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGKILL)
        if word == "tokenize":  # for longer than start_minutes
            time.sleep(90 * start_minutes)
        join_process_group(timedelta(hours=12))
    leave_process_group()


def _meet(words: dict[int, str], start_minutes: float, environ: dict[str, str], log: Path) -> None:
    redirect_output(log)
    os.environ.update(environ)
    meet(words, start_minutes)


def meet_on_hosts(
    words: dict[int, str], tmp_path: Path, start_minutes: float = 10, by_torchrun: bool = False
) -> list[tuple[int, list[str]]]:
    """Two hosts with a rank each. Returns the exit code of each rank, and the errors on its screen."""
    import torch.distributed as dist

    environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    environ |= {"LOCAL_SIZE": "1", "TORCHELASTIC_USE_AGENT_STORE": str(by_torchrun)}
    store = None
    if by_torchrun:
        store = dist.TCPStore("127.0.0.1", int(environ["MASTER_PORT"]), is_master=True, wait_for_workers=False)
    logs = {rank: tmp_path / f"host{rank}.log" for rank in range(2) if words.get(rank) != "never start"}
    ranks = {
        rank: FORKSERVER.Process(target=_meet, args=(words, start_minutes, {**environ, "RANK": str(rank)}, log))
        for rank, log in logs.items()
    }
    for process in ranks.values():
        process.start()
    for process in ranks.values():
        process.join(SECONDS_TO_END)
        alive = process.is_alive()
        process.kill()
        assert not alive, [log.read_text() for log in logs.values()]
    del store
    errors = [[line for line in log.read_text().splitlines() if line.startswith("error")] for log in logs.values()]
    return [(process.exitcode, error) for process, error in zip(ranks.values(), errors, strict=True)]


SECONDS_TO_END = 600
MISTAKE = "train_file=x.jsonl: there is no such file"


@pytest.mark.parametrize("by_torchrun", [False, True], ids=["store of rank 0", "store of torchrun"])
@pytest.mark.parametrize("failing", [0, 1])
def test_a_mistake_on_one_host_ends_the_others_with_its_line(failing: int, by_torchrun: bool, tmp_path: Path) -> None:
    found = meet_on_hosts({failing: "fail"}, tmp_path, by_torchrun=by_torchrun)
    assert found[failing] == (1, [f"error: {MISTAKE}"])
    assert found[1 - failing] == (1, [f"error: rank {failing} ({socket.gethostname()}) has ended: {MISTAKE}"])


def test_a_mistake_before_the_ranks_watch_each_other_ends_them_too(tmp_path: Path) -> None:
    (_, error), _ = meet_on_hosts({1: "fail early"}, tmp_path)
    assert error == [f"error: rank 1 ({socket.gethostname()}) has ended: torch: the version is wrong"]


def test_an_exception_on_one_host_ends_the_others(tmp_path: Path) -> None:
    found, _ = meet_on_hosts({1: "raise"}, tmp_path)
    assert found == (70, [f"error: rank 1 ({socket.gethostname()}) has ended: RuntimeError: unexpected"])


@pytest.mark.parametrize("word", ["kill", "never start"])
def test_a_rank_that_is_not_heard_of_is_named(word: str, tmp_path: Path) -> None:
    (code, errors), *_ = meet_on_hosts({1: word}, tmp_path, start_minutes=0.05)
    assert code == 75 and len(errors) == 1
    assert errors[0].startswith("error: rank 1 has not been heard of at 127.0.0.1:")
    assert errors[0].endswith(
        " for start_minutes=0.05: it was not started, it was killed, or its host cannot be reached"
    )


def test_a_main_rank_that_ends_or_never_starts_is_named(tmp_path: Path) -> None:
    assert meet_on_hosts({0: "kill"}, tmp_path)[1] == (
        75, ["error: rank 0 has ended; the screen of its host and its log say why"],
    )  # fmt: skip
    ((code, (error,)),) = meet_on_hosts({0: "never start"}, tmp_path, start_minutes=0.05)
    assert code == 75 and error.startswith("error: rank 0 has not been heard of at 127.0.0.1:")


def test_a_host_that_works_for_longer_than_start_minutes_is_waited_for(tmp_path: Path) -> None:
    assert meet_on_hosts({0: "tokenize"}, tmp_path, start_minutes=0.05) == [(0, []), (0, [])]
