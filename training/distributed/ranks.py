"""This process's rank among those that were started, from the launcher's environment variables; and errors that end
all of them.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from random import SystemRandom
from typing import NoReturn

import console
from errors import Ending, UserError, choose_ending, explain_refusal
from masking import mask_text, print_exception
from training.distributed.ending import announce_end, record_end

SECONDS_FOR_ANOTHER_TO_REPORT = 10
_TRIED_PORTS = 50
_FIRST_HANDED_OUT = 32_768  # to connections, by Linux as it is
_SLURM = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")  # which srun sets for each task
# Where exceptions of a collective are raised, which is C++ called from one of these modules or from those below them.
_COMMUNICATION = ("torch.distributed", "torch.autograd", "deepspeed", "models.parallel.exchanges")
# Messages of gloo and torch's store when the process at the other end is gone.
_LOST_PEER = re.compile(
    r"connection (closed|reset) by peer|broken pipe|connection was (closed|reset)|failed to recv|recvvalue failed",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Ranks:
    """This process's rank, globally and on its host."""

    rank: int
    world_size: int
    local_rank: int
    local_size: int  # ranks on this host

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def say(self, text: str) -> None:
        """Print to the screen, on the main rank alone."""
        if self.is_main:
            console.say(text)

    def phase(self, what: str) -> AbstractContextManager[None]:
        """Return a context in which the screen says `what` if it takes long; on the main rank alone."""
        return console.phase(what, shown=self.is_main)


SINGLE_PROCESS = Ranks(rank=0, world_size=1, local_rank=0, local_size=1)


def read_ranks() -> Ranks:
    """Read the ranks from the variables that `deepspeed`, `torchrun` or `srun` set. Without any, the process is alone,
    and torch's variables are set.

    Raises UserError when `srun` spans several hosts and MASTER_ADDR does not name the main one, and when the variables
    of a launcher are incomplete or no numbers.
    """
    # In a batch script itself the latter is not set: the process is alone.
    if "RANK" not in os.environ and "SLURM_STEP_NUM_TASKS" in os.environ:
        _translate_slurm()
    environ, alone = os.environ, {"LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_port())}
    if "RANK" not in environ:
        environ.update(alone, RANK="0", WORLD_SIZE="1")
    elif environ.get("WORLD_SIZE") == "1":  # what starts containers may set no more
        environ.update({name: value for name, value in alone.items() if name not in environ})
    local_size = environ.get("LOCAL_SIZE") or environ.get("LOCAL_WORLD_SIZE") or environ.get("WORLD_SIZE", "")
    named = {name: environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")} | {"LOCAL_SIZE": local_size}
    if wrong := [name for name, value in named.items() if not value.isdecimal()]:
        raise UserError(
            f"RANK={environ['RANK']} is set, as a launcher does, and {wrong[0]} is {named[wrong[0]] or 'not'}; start "
            "the run with deepspeed, torchrun or srun, or without a launcher's variables: env -u RANK"
        )
    return Ranks(*map(int, named.values()))


def find_free_port() -> int:
    """Return a free port: another run on this machine may use the default one.

    A run listens on it only some seconds later. So it is one that the system gives to no connection meanwhile, where
    there are such ports.
    """
    for port in SystemRandom().sample(_list_own_ports(), _TRIED_PORTS):  # a seed of the run chooses nothing here
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _list_own_ports() -> range:
    """Return the ports below those that the system hands out, as many as a choice needs; those, where all are."""
    file = Path("/proc/sys/net/ipv4/ip_local_port_range")
    first = int(file.read_text().split()[0]) if file.exists() else _FIRST_HANDED_OUT
    return range(max(1024, first - 10_000), first) if first > 1024 + _TRIED_PORTS else range(first, 65_536)


def _translate_slurm() -> None:
    """Translate srun's variables into those that torch reads."""
    environ = os.environ
    if "MASTER_ADDR" not in environ:
        if environ.get("SLURM_STEP_NUM_NODES", "1") != "1":
            raise UserError(
                "srun on several hosts needs MASTER_ADDR, the first host of the job; scripts/slurm.sh sets it"
            )
        environ["MASTER_ADDR"] = "127.0.0.1"
    missing = [name for name in _SLURM if name not in environ]
    if missing:
        raise UserError(
            f"SLURM_STEP_NUM_TASKS={environ['SLURM_STEP_NUM_TASKS']} is set, as srun does, and {', '.join(missing)} "
            "not; start the run with srun (scripts/slurm.sh), or without srun's variables: env -u SLURM_STEP_NUM_TASKS"
        )
    # Jobs that share a host get different ports.
    environ.setdefault("MASTER_PORT", str(20000 + int(environ.get("SLURM_JOB_ID", "0")) % 20000))
    tasks_per_node = environ["SLURM_STEP_TASKS_PER_NODE"].partition("(")[0].partition(",")[0]  # "8(x4)"
    environ.update(
        RANK=environ["SLURM_PROCID"],
        WORLD_SIZE=environ["SLURM_STEP_NUM_TASKS"],
        LOCAL_RANK=environ["SLURM_LOCALID"],
        LOCAL_WORLD_SIZE=tasks_per_node,
    )


@contextmanager
def exit_on_user_error(ranks: Ranks, reports: bool = True, log: Path | None = None) -> Iterator[None]:
    """Turn a UserError, or an error of the disk or of permissions, into one line on stderr and an exit code (`Ending`).

    reports: False on a rank that will find the same error as another: it prints nothing, and gives the other time to
    report, since the launcher ends all ranks as soon as one of them has ended. log: this rank's log file, once it has
    one. Then any other exception is one line too, which names the rank, and its stack trace goes to the log, not
    between the other ranks' lines; before, a reader of the screen that has gone ends the command in silence. A rank
    whose peer is gone first waits for the launcher to end it: the peer has reported the cause.
    """
    try:
        yield
    except Exception as error:
        if log is None and isinstance(error, BrokenPipeError) and error.filename is None:
            _leave_screen()
        known = (
            error if isinstance(error, UserError) else explain_refusal(error) if isinstance(error, OSError) else None
        )
        trace = "" if known is not None or log is None else _keep_trace(error, log)
        if not reports or is_lost_peer(error):
            time.sleep(SECONDS_FOR_ANOTHER_TO_REPORT)
        if known is None and log is None:
            announce_end(Ending.EXCEPTION, _describe_unexpected(error))
            raise
        if reports:
            where = f" (rank {ranks.rank})" if log is not None and ranks.world_size > 1 else ""
            text = f"{_describe_unexpected(error)}; {trace}" if known is None else _message(known)
            console.say_last(f"\nerror{where}: {text}\n")
            record_end(find_ending(error), text)
        sys.exit(find_ending(error))


@contextmanager
def refuse_exits() -> Iterator[None]:
    """Turn an exit that code which a run calls asks for, such as a user-defined loss, into an exception: with its code
    the run would seem to have finished. Those of this module pass.

    Raises RuntimeError.
    """
    try:
        yield
    except SystemExit as ended:
        if isinstance(ended.code, Ending):
            raise
        raise RuntimeError(f"sys.exit({ended.code!r}) was called before the run had finished") from ended


def find_ending(error: Exception) -> Ending:
    """Return what an exception ends a rank as."""
    if isinstance(error, UserError):
        return error.ending
    if is_lost_peer(error):
        return Ending.LOST_RANK
    if not isinstance(error, OSError):
        return Ending.EXCEPTION
    ending = choose_ending(error)
    return ending if ending is Ending.DISK or explain_refusal(error) is not None else Ending.EXCEPTION


def _leave_screen() -> NoReturn:
    """End a command whose reader has read enough (`| head`)."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it once more at its end
    sys.exit(128 + signal.SIGPIPE)


def _keep_trace(error: Exception, log: Path) -> str:
    """Write the stack trace to the log. Returns, in words, where it is: with it where the disk takes nothing more."""
    try:
        with open(log, "a") as stream:
            print_exception(error, stream)
    except OSError as refused:
        trace = mask_text("".join(traceback.format_exception(error)))
        return f"{log} cannot be written ({refused.strerror or refused}), so this is its stack trace:\n{trace}"
    return f"the stack trace is in {log}"


def _describe_unexpected(error: Exception) -> str:
    if is_lost_peer(error):
        return "another rank has ended, and its message is the cause"
    return f"{type(error).__name__}: {_message(error)}"


def _message(error: Exception) -> str:
    """The message of an exception on one line. In an exception from a DataLoader's process it is the end of a stack
    trace."""
    lines = str(error).strip().splitlines() or ["no message"]
    return (lines[-1].partition(": ")[2] or lines[-1]) if lines[0].startswith("Caught ") else lines[0]


def is_lost_peer(error: BaseException | None) -> bool:
    """Returns whether a collective has failed because the process at the other end is gone. Code of a user, which may
    use a network too, raises exceptions of the same text elsewhere."""
    return isinstance(error, RuntimeError) and names_lost_peer(error) and _raised_in(error).startswith(_COMMUNICATION)


def names_lost_peer(error: RuntimeError) -> bool:
    """Returns whether the exception of a collective says that the process at the other end is gone."""
    return _LOST_PEER.search(str(error)) is not None


def _raised_in(error: BaseException) -> str:
    """Return the name of the module that has raised an exception, or has called the C++ that has."""
    name = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        name = frame.f_globals.get("__name__", "")
    return name


def raise_together(error: UserError | None) -> None:
    """End all ranks when any of them has an error; the lowest rank with one raises it, the others exit silently with
    the same code.

    All ranks call it, in a process group. For mistakes that several ranks may find, and should not all report.
    """
    import torch.distributed as dist  # not above: a mistyped key is reported without waiting for torch

    gathered: list[Ending | None] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, None if error is None else error.ending)
    endings = {rank: ending for rank, ending in enumerate(gathered) if ending is not None}
    if not endings:
        return
    first = min(endings)
    if error is not None and first == dist.get_rank():
        raise error
    time.sleep(SECONDS_FOR_ANOTHER_TO_REPORT)
    sys.exit(endings[first])
