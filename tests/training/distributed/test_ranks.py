"""Who a process is, and how a mistake on one rank ends all of them."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support.launching import ROOT
from support.workers import WorkerGroup

from errors import Ending, UserError
from training.distributed import ranks as ranks_module
from training.distributed.ranks import (
    Ranks,
    exit_on_user_error,
    find_free_port,
    raise_together,
    read_ranks,
    refuse_exits,
)

MAIN, OTHER = Ranks(0, 2, 0, 2), Ranks(1, 2, 1, 2)


@pytest.fixture
def naps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that were slept, which took no time."""
    slept: list[float] = []
    monkeypatch.setattr(ranks_module.time, "sleep", slept.append)
    return slept


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, Ranks(0, 1, 0, 1)),
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "pod-0"}, Ranks(0, 1, 0, 1)),  # a container of one process
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_SIZE": "4"}, Ranks(5, 8, 1, 4)),  # deepspeed
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}, Ranks(5, 8, 1, 4)),  # torchrun
        (
            {
                "SLURM_STEP_NUM_TASKS": "8",
                "SLURM_STEP_NUM_NODES": "2",
                "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
                "SLURM_PROCID": "5",
                "SLURM_LOCALID": "1",
                "SLURM_JOB_ID": "7",
                "MASTER_ADDR": "node-a",
            },
            Ranks(5, 8, 1, 4),
        ),
        (
            {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"},
            Ranks(0, 1, 0, 1),
        ),  # in the batch script, without srun
    ],
)
def test_ranks_come_from_the_launchers_variables(
    environ: dict[str, str], expected: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", dict(environ))
    assert read_ranks() == expected
    assert os.environ["WORLD_SIZE"] == str(expected.world_size)  # torch reads it there


def test_a_free_port_is_not_one_that_connections_are_given() -> None:
    """Or a connection of another run could take it before this one listens on it."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = [find_free_port() for _ in range(20)]
    assert max(ports) < first and len(set(ports)) > 1


def test_a_port_that_is_taken_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        monkeypatch.setattr(ranks_module, "_list_own_ports", lambda: range(port, port + 1))
        monkeypatch.setattr(ranks_module, "_TRIED_PORTS", 1)
        assert find_free_port() != port


def test_a_variable_of_srun_without_the_others_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"})
    with pytest.raises(UserError, match="SLURM_LOCALID, SLURM_STEP_TASKS_PER_NODE not; start the run with srun"):
        read_ranks()


def test_a_reader_of_the_screen_that_has_gone_ends_a_command_in_silence() -> None:
    code = """
from training.distributed.ranks import SINGLE_PROCESS, exit_on_user_error
with exit_on_user_error(SINGLE_PROCESS):
    for number in range(10**6):
        print(number)
"""
    words = [sys.executable, "-c", code]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "0\n"
        process.stdout.close()
        assert process.stderr.read() == "" and process.wait(timeout=60) == 141


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "0"}, "RANK=0 is set, as a launcher does, and WORLD_SIZE is not; start the run with deepspeed,"),
        ({"RANK": ""}, "RANK= is set, as a launcher does, and RANK is not;"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "and LOCAL_RANK is not"),
        ({"RANK": "0", "WORLD_SIZE": "two", "LOCAL_RANK": "0"}, "and WORLD_SIZE is two"),
    ],
)
def test_a_launchers_variables_without_the_others_are_one_line(
    environ: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", environ)
    with pytest.raises(UserError, match=message):
        read_ranks()


def test_srun_on_several_hosts_needs_the_main_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "2"})
    with pytest.raises(UserError, match="needs MASTER_ADDR.*scripts/slurm.sh"):
        read_ranks()


def raised_in(module: str, error: Exception) -> Exception:
    """The exception, once code of that module has raised it."""
    try:
        exec("raise error", {"__name__": module, "error": error})
    except Exception as caught:
        return caught
    raise AssertionError


def fail(error: BaseException, ranks: Ranks, **options: Any) -> int:
    with pytest.raises(SystemExit) as caught, exit_on_user_error(ranks, **options):
        raise error
    return caught.value.code


def test_a_mistake_is_one_line_and_exit_code_1(
    naps: list[float], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(ranks_module.sys, "__stderr__", ranks_module.sys.stderr)
    assert fail(UserError("seed=-1: at least 0"), MAIN) == 1
    assert capfd.readouterr() == ("", "\nerror: seed=-1: at least 0\n\n")
    assert fail(UserError("x"), OTHER, log=tmp_path / "rank_1.log") == 1
    assert capfd.readouterr() == ("", "\nerror (rank 1): x\n\n")
    assert naps == [] and not (tmp_path / "rank_1.log").exists()


def test_what_the_disk_or_its_owner_refuse_is_one_line_too(
    naps: list[float], monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    monkeypatch.setattr(ranks_module.sys, "__stderr__", ranks_module.sys.stderr)
    assert fail(PermissionError(errno.EACCES, "Permission denied", "/m/config.json"), MAIN) == 1
    assert (
        capfd.readouterr().err == "\nerror: /m/config.json: Permission denied; ask its owner, or take another path\n\n"
    )
    assert fail(OSError(errno.ENOSPC, "No space left on device", "/o/metrics.jsonl"), MAIN) == 74
    assert (
        "error: /o/metrics.jsonl cannot be written: No space left on device; make room, then continue with "
        "resume=auto" in capfd.readouterr().err
    )
    with pytest.raises(IsADirectoryError), exit_on_user_error(MAIN):
        raise IsADirectoryError(errno.EISDIR, "Is a directory")


def test_a_rank_that_finds_the_same_lets_the_other_speak(naps: list[float], monkeypatch, capfd) -> None:
    monkeypatch.setattr(ranks_module.sys, "__stderr__", ranks_module.sys.stderr)
    assert fail(UserError("x"), OTHER, reports=False) == 1
    assert capfd.readouterr() == ("", "") and naps == [10]


LOST = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1"


@pytest.mark.parametrize(
    "module, error, seconds",
    [
        ("torch.distributed.distributed_c10d", RuntimeError(LOST), [10]),
        ("models.parallel.exchanges", RuntimeError(LOST), [10]),
        ("my.callbacks", RuntimeError("Connection reset by peer"), []),  # to a tracker, say
        ("torch._utils", RuntimeError("Connection reset by peer"), []),  # in a data worker
        ("torch.distributed.distributed_c10d", RuntimeError("shape mismatch"), []),
        ("torch.distributed.distributed_c10d", KeyError("x"), []),
    ],
)
def test_a_bug_keeps_its_trace_and_a_lost_peer_waits_to_be_ended(
    naps: list[float], module: str, error: Exception, seconds: list[int]
) -> None:
    with pytest.raises(type(error)), exit_on_user_error(OTHER):
        raise raised_in(module, error)
    assert naps == seconds


BUGS = [
    (
        raised_in("torch.distributed", RuntimeError(f"{LOST}\nsecond line")),
        75,
        [10],
        "another rank has ended, and its message is the cause",
    ),
    (ValueError("a bug\nsecond line"), 70, [], "ValueError: a bug"),
    (KeyError(), 70, [], "KeyError: no message"),
]


@pytest.mark.parametrize("error, code, seconds, message", BUGS)
def test_with_a_log_a_bug_is_one_line_too_and_its_trace_is_there(
    error: Exception,
    code: int,
    seconds: list[float],
    message: str,
    naps: list[float],
    monkeypatch,
    capfd,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(ranks_module.sys, "__stderr__", ranks_module.sys.stderr)
    log = tmp_path / "rank_1.log"
    log.write_text("before\n")
    assert fail(error, OTHER, log=log) == code and naps == seconds
    assert capfd.readouterr() == ("", f"\nerror (rank 1): {message}; the stack trace is in {log}\n\n")
    assert (
        log.read_text().startswith("before\nTraceback")
        and "in fail\n    raise error" in log.read_text()
        and str(error) in log.read_text()
    )


@pytest.mark.parametrize("code", [0, None, "a text"])
def test_an_exit_within_a_run_is_not_the_end_of_one_that_has_finished(code, monkeypatch, capfd, tmp_path: Path) -> None:
    monkeypatch.setattr(ranks_module.sys, "__stderr__", ranks_module.sys.stderr)
    log = tmp_path / "rank_1.log"
    with pytest.raises(SystemExit) as caught, exit_on_user_error(OTHER, log=log), refuse_exits():
        sys.exit(code)
    assert caught.value.code == 70 and "sys.exit(code)" in log.read_text()
    assert capfd.readouterr().err == (
        f"\nerror (rank 1): RuntimeError: sys.exit({code!r}) was called before the run had finished; the stack trace "
        f"is in {log}\n\n"
    )


def test_a_rank_that_ends_because_another_has_a_mistake_says_nothing(capfd, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as caught, exit_on_user_error(OTHER, log=tmp_path / "log"), refuse_exits():
        sys.exit(Ending.DISK)  # as `raise_together` ends it
    assert caught.value.code == 74 and capfd.readouterr() == ("", "")


def test_on_a_full_disk_the_cause_and_its_trace_are_on_the_screen(monkeypatch, capfd) -> None:
    monkeypatch.setattr(ranks_module.sys, "__stderr__", ranks_module.sys.stderr)
    assert fail(ValueError("the cause"), OTHER, log=Path("/dev/full")) == 70
    said = capfd.readouterr().err
    assert said.startswith(
        "\nerror (rank 1): ValueError: the cause; /dev/full cannot be written (No space left on device), so this is "
        "its stack trace:\nTraceback"
    )
    assert "in fail\n    raise error" in said


def fail_to_meet() -> bool:
    """On rank 0: whether the error of a collective whose other rank has ended is taken for that."""
    import torch
    import torch.distributed as dist

    if dist.get_rank() == 1:
        os._exit(1)
    try:
        while True:
            dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        return ranks_module.is_lost_peer(error)


def test_a_peer_that_is_lost_is_known_by_a_real_error(tmp_path: Path) -> None:
    with closing(WorkerGroup(2, tmp_path)) as group:
        group.send(fail_to_meet)
        assert group._answer(0) == (True, True)


@pytest.mark.parametrize(
    "kind, code, message",
    [(UserError, 1, "line 3: fix it"), (ValueError, 70, "ValueError: line 3: fix it; the stack trace is in {log}")],
)
def test_an_error_in_a_data_loader_process_is_reported_in_its_own_words(
    kind, code: int, message: str, monkeypatch, capfd, tmp_path: Path
) -> None:
    from torch._utils import ExceptionWrapper

    monkeypatch.setattr(ranks_module.sys, "__stderr__", ranks_module.sys.stderr)
    try:
        raise kind("line 3: fix it")
    except kind:
        wrapped = ExceptionWrapper(where="in DataLoader worker process 0")
    with pytest.raises(kind) as caught:
        wrapped.reraise()
    log = tmp_path / "rank_1.log"
    assert fail(caught.value, OTHER, log=log) == code
    assert capfd.readouterr().err == f"\nerror (rank 1): {message.format(log=log)}\n\n"


def test_before_there_is_a_log_one_of_the_ranks_traces_comes_first(naps: list[float]) -> None:
    with pytest.raises(KeyError), exit_on_user_error(OTHER, reports=False):
        raise KeyError("x")
    assert naps == [10]


def agree(failing: tuple[int, ...], ending: Ending = Ending.MISTAKE) -> str:
    import torch.distributed as dist

    ranks_module.time.sleep, sleep = lambda seconds: None, ranks_module.time.sleep
    try:
        raise_together(UserError("mistake", ending) if dist.get_rank() in failing else None)
    except UserError:
        return "speaks"
    except SystemExit as end:
        return f"ends with {end.code}"
    finally:
        ranks_module.time.sleep = sleep
    return "continues"


def test_of_several_ranks_with_a_mistake_one_speaks(workers) -> None:
    group = workers(2)
    assert group.run(agree, ()) == ["continues", "continues"]
    assert group.run(agree, (1,)) == ["ends with 1", "speaks"]
    assert group.run(agree, (0, 1)) == ["speaks", "ends with 1"]
    assert group.run(agree, (1,), Ending.DISK) == ["ends with 74", "speaks"]
