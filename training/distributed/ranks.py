"""Who this process is among the started ones, as the launcher says it in the environment."""

from __future__ import annotations

import os
import re
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import console
from errors import UserError, explain_refusal

SECONDS_TO_LET_ANOTHER_SPEAK = 10
# What gloo and torch's store say when the process at the other end is gone.
_LOST_PEER = re.compile(
    r"connection (closed|reset) by peer|broken pipe|connection was (closed|reset)|failed to recv|recvvalue failed",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Ranks:
    rank: int
    world_size: int
    local_rank: int
    local_size: int  # ranks on this host

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def say(self, text: str) -> None:
        """Tells the person at the screen, once: on the main rank alone."""
        if self.is_main:
            console.say(text)


ALONE = Ranks(rank=0, world_size=1, local_rank=0, local_size=1)


def read_ranks() -> Ranks:
    """From the variables that `deepspeed`, `torchrun` and `srun` set; a process started without any is alone, and made so for torch.

    Raises UserError when `srun` spans several hosts and nobody has said which is the main one.
    """
    if (
        "RANK" not in os.environ and "SLURM_STEP_NUM_TASKS" in os.environ
    ):  # a batch script itself lacks the latter: it is alone
        _translate_slurm()
    if "RANK" not in os.environ:
        os.environ.update(
            RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(find_free_port())
        )
    environ = os.environ
    local_size = environ.get("LOCAL_SIZE") or environ.get("LOCAL_WORLD_SIZE") or environ["WORLD_SIZE"]
    return Ranks(int(environ["RANK"]), int(environ["WORLD_SIZE"]), int(environ["LOCAL_RANK"]), int(local_size))


def find_free_port() -> int:
    """Another run on this machine may hold the usual one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _translate_slurm() -> None:
    """srun's variables into those that torch reads."""
    environ = os.environ
    if "MASTER_ADDR" not in environ:
        if int(environ["SLURM_STEP_NUM_NODES"]) > 1:
            raise UserError(
                "srun on several hosts needs MASTER_ADDR, the first host of the job; scripts/slurm.sh sets it"
            )
        environ["MASTER_ADDR"] = "127.0.0.1"
    environ.setdefault(
        "MASTER_PORT", str(20000 + int(environ["SLURM_JOB_ID"]) % 20000)
    )  # jobs that share a host keep apart
    tasks_per_node = environ["SLURM_STEP_TASKS_PER_NODE"].partition("(")[0].partition(",")[0]  # "8(x4)"
    environ.update(
        RANK=environ["SLURM_PROCID"],
        WORLD_SIZE=environ["SLURM_STEP_NUM_TASKS"],
        LOCAL_RANK=environ["SLURM_LOCALID"],
        LOCAL_WORLD_SIZE=tasks_per_node,
    )


@contextmanager
def exit_on_user_error(ranks: Ranks, speaks: bool = True, log: Path | None = None) -> Iterator[None]:
    """Turns a UserError, or what the disk or its owner refuse, into one line on stderr and exit code 1.

    speaks: False on a rank that is about to find the same error as another: it keeps quiet, and gives the other the time to speak,
    since the launcher ends all ranks as soon as one of them has ended.
    log: this rank's, once it has one. Then any other exception is one line too, which names the rank, and its stack trace is in the log,
    not between the other ranks' words. A rank whose peer is gone first waits to be ended by the launcher: the peer has said why.
    """
    try:
        yield
    except Exception as error:
        told = error if isinstance(error, UserError) else explain_refusal(error) if isinstance(error, OSError) else None
        if told is None and log is not None:
            with open(log, "a") as stream:
                traceback.print_exception(error, file=stream)
        if not speaks or is_lost_peer(error):
            time.sleep(SECONDS_TO_LET_ANOTHER_SPEAK)
        if told is None and log is None:
            raise
        if speaks:
            where = f" (rank {ranks.rank})" if log is not None and ranks.world_size > 1 else ""
            text = f"{_describe_unexpected(error)}; the stack trace is in {log}" if told is None else _words(told)
            console.say_last(f"\nerror{where}: {text}\n")
        sys.exit(1)


def _describe_unexpected(error: Exception) -> str:
    if is_lost_peer(error):
        return "another rank has ended, and the error is what it has said"
    return f"{type(error).__name__}: {_words(error)}"


def _words(error: Exception) -> str:
    """What an exception says, on one line. One from a process of a DataLoader says its whole stack trace, and the words at the end of it."""
    lines = str(error).strip().splitlines() or ["no words"]
    return (lines[-1].partition(": ")[2] or lines[-1]) if lines[0].startswith("Caught ") else lines[0]


def is_lost_peer(error: BaseException | None) -> bool:
    """Whether a collective has failed because the process at the other end is gone."""
    return isinstance(error, RuntimeError) and _LOST_PEER.search(str(error)) is not None


def raise_together(error: UserError | None) -> None:
    """Ends all ranks when any of them has an error; the lowest that has one raises it, the others go quietly.

    All ranks call it, in a process group. For mistakes that several ranks may find, and should not all tell.
    """
    import torch.distributed as dist  # not above: a mistyped key need not wait for torch

    failed: list[bool] = [False] * dist.get_world_size()
    dist.all_gather_object(failed, error is not None)
    if not any(failed):
        return
    if error is not None and failed.index(True) == dist.get_rank():
        raise error
    time.sleep(SECONDS_TO_LET_ANOTHER_SPEAK)
    sys.exit(1)
