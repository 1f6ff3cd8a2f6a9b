"""A part of the report is a list of rows; each is run within what is left of the part's time, and none ends the others.

Out of memory, a crash, a hang and no time left are results like any other.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol, TypeVar

from benchmarks.gpu_parts.machine import Machine, is_installed
from benchmarks.gpu_parts.processes import STOPPED, Deadline, RowFailed, TimeLimit

Cells = dict[str, str]  # column -> text
NO_TIME = "time"  # the beginning of the note of a row that was left out, or ended, for lack of time
_MOST_AT_ONCE = 8


class Status(Enum):
    ok = "OK"
    measured = "-"
    wrong = "WRONG"
    failed = "FAILED"
    out_of_memory = "out of memory"
    timed_out = "timed out"
    not_run = "not run"

    @property
    def is_bad(self) -> bool:
        """Returns whether the report ends with exit code 1. A GPU that is too small is not an error."""
        return self in (Status.wrong, Status.failed, Status.timed_out)


class NotRun(Exception):
    """A row cannot run on this machine; the message says why."""


def check_needs(needs: Sequence[str], machine: Machine) -> None:
    """Raises NotRun with the reason."""
    for need in needs:
        if need == "gpu" and machine.is_cpu:
            raise NotRun("needs a GPU")
        if need == "hopper" and machine.capability != "9.0":
            raise NotRun("needs a GPU of compute capability 9.0")
        if need == "compiler" and not machine.is_cpu:
            _check_compiler()
        if need not in ("gpu", "hopper", "compiler") and not is_installed(need):
            raise NotRun(f"the package {need} is not installed")


def _check_compiler() -> None:
    from models.layers.fused_kernels import find_triton_obstacle

    obstacle = find_triton_obstacle()
    if obstacle is not None:
        raise NotRun(obstacle)


@dataclass(frozen=True)
class Row:
    """work(deadline): the cells of the row, and whether they are right. Raises NotRun, RowFailed.

    expected: seconds; it is not started when less is left. limit: it is ended after so many.
    """

    name: str
    work: Callable[[Deadline], tuple[Status, Cells]]
    expected: float
    limit: float


@dataclass(frozen=True)
class Result:
    name: str
    status: Status
    cells: Cells = field(default_factory=dict)
    note: str = ""
    seconds: float = 0.0
    tail: str = ""  # of the log of a row that failed


def count_jobs(cores: int) -> int:
    """Returns how many rows run side by side. cores: of this host, for one of them."""
    return max(1, min(_MOST_AT_ONCE, (os.cpu_count() or 1) // cores))


class Named(Protocol):
    """A row or an item, which a user chooses by its name."""

    @property
    def name(self) -> str: ...


N = TypeVar("N", bound=Named)


def choose_rows(rows: Sequence[N], texts: Sequence[str]) -> list[N]:
    """Returns those of the names in `texts`; of a text that is the name of none, all whose name holds it."""
    names = {row.name for row in rows}
    return [row for row in rows if any(text == row.name or (text not in names and text in row.name) for text in texts)]


def run_row(row: Row, seconds_left: float) -> Result:
    if seconds_left < row.expected:
        return Result(row.name, Status.not_run, note=NO_TIME)
    started = time.monotonic()

    def conclude(status: Status, cells: Cells | None = None, note: str = "", tail: str = "") -> Result:
        return Result(row.name, status, cells or {}, note, time.monotonic() - started, tail)

    deadline = Deadline(min(row.limit, seconds_left))
    try:
        status, cells = row.work(deadline)
        return conclude(status, cells)
    except NotRun as reason:
        return conclude(Status.not_run, note=str(reason))
    except TimeLimit as failure:
        if deadline.seconds < row.limit:  # it may have been about to end
            return conclude(Status.not_run, note=f"{NO_TIME} was up after {deadline.seconds:.0f} s", tail=failure.tail)
        return conclude(Status.timed_out, note=f"ended after {deadline.seconds:.0f} s", tail=failure.tail)
    except RowFailed as failure:
        status = Status.out_of_memory if failure.out_of_memory else Status.failed
        return conclude(status, note=str(failure), tail=failure.tail)
    except Exception as error:  # a row must not end the others
        return conclude(Status.failed, note=f"{type(error).__name__}: {error}")


def run_rows(rows: Sequence[Row], budget: float, show: Callable[[Result], None], jobs: int = 1) -> list[Result]:
    """Runs the rows within `budget` seconds, `jobs` at a time; `show` gets each result when it is there.

    Returns them in the order of the rows.
    """
    deadline = time.monotonic() + budget
    results: dict[str, Result] = {}
    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(lambda row=row: run_row(row, deadline - time.monotonic())) for row in rows]
        try:
            for future in as_completed(futures):
                result = future.result()
                results[result.name] = result
                show(result)
        except KeyboardInterrupt:
            STOPPED.set()  # ends what runs
            pool.shutdown(cancel_futures=True)
            raise
    return [results[row.name] for row in rows]
