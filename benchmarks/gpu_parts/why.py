"""*why*: one step under the profiler (`profile_trace`), of a stage of 8B: what runs, what waits, what idles."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.gpu_parts.machine import Machine
from benchmarks.gpu_parts.measured_runs import TRACED_STEP, MeasuredRuns
from benchmarks.gpu_parts.processes import Deadline, RowFailed
from benchmarks.gpu_parts.rows import Cells, NotRun, Row, Status, check_needs
from benchmarks.gpu_parts.training_runs import write_name
from console import pluralize

if TYPE_CHECKING:
    from training.observability.trace_summary import StepProfile

_TOP = 5
_SECONDS = {"cuda": (45, 200), "cpu": (20, 150)}  # expected of a run, and at most


@dataclass(frozen=True)
class Case:
    """A run to trace; every rank of it is a row of figures."""

    name: str
    shape: str
    overrides: tuple[str, ...] = ()
    world_size: int = 1


CASES = (
    Case("8b stage", "8b stage"),
    Case("8b stage, packing", "8b stage", ("data.packing=true",)),
    Case("8b stage, compile", "8b stage", ("compile=true",)),
    Case("8b stage, LoRA", "8b stage", ("adapter=lora",)),
    Case("1b", "1b"),
    Case("8b stage, pp2", "8b stage", ("num_stages=2",), world_size=2),
)


class Why:
    """The rows of one machine."""

    TITLE = f"why: step {TRACED_STEP} under the profiler"
    COLUMNS = ("step", "computing", "communicating only", "idle", "waits and copies", "most time in")

    def __init__(self, machine: Machine, folder: Path, logs: Path, tiny: bool) -> None:
        self.machine, self.logs = machine, logs
        self.runs = MeasuredRuns(machine, folder, logs, tiny)

    def list_rows(self) -> list[Row]:
        expected, limit = _SECONDS[self.machine.device]
        return [Row(case.name, partial(self._trace, case), expected, limit) for case in CASES]

    def _trace(self, case: Case, deadline: Deadline) -> tuple[Status, Cells]:
        if case.world_size > max(1, len(self.machine.gpus)) and not self.machine.is_cpu:
            raise NotRun(f"needs {pluralize(case.world_size, 'GPU')}")
        if "compile=true" in case.overrides:
            check_needs(("compiler",), self.machine)
        name = write_name(case.name)
        overrides = (*case.overrides, f"profile_trace={TRACED_STEP}")
        _, output = self.runs.run(name, case.shape, overrides, deadline, case.world_size)
        shutil.copyfile(output / f"profile_step_{TRACED_STEP}.txt", self.logs / f"{name}_profile.txt")
        profiles = list(read_profiles(output))
        if not profiles:
            raise RowFailed("the run has left no trace")
        return Status.measured, render(profiles)


def read_profiles(output: Path) -> Iterator[StepProfile]:
    """Yields the profile of each rank, from the traces of a run."""
    from training.observability.trace_summary import summarize_trace

    for rank in range(len(list((output / "traces").glob("rank_*.json.gz")))):
        with gzip.open(output / "traces" / f"rank_{rank}.json.gz", "rt") as file:
            yield summarize_trace(json.load(file)["traceEvents"], f"optimizer step {TRACED_STEP}")


def render(profiles: list[StepProfile]) -> Cells:
    """Returns the cells of several ranks, one after the other, and what took most of the first one's time."""
    first = profiles[0]
    ops = first.device_ops or first.host_ops
    top = "; ".join(f"{op.seconds / first.step:.0%} {op.name[:40]} x {op.calls}" for op in ops[:_TOP])
    waits = (", ".join(f"{name} {calls}" for name, calls in profile.waits.items()) or "none" for profile in profiles)
    return {
        "step": _join(f"{profile.step * 1000:,.0f} ms" for profile in profiles),
        "computing": _join(f"{profile.computing / profile.step:.1%}" for profile in profiles),
        "communicating only": _join(f"{profile.communicating / profile.step:.1%}" for profile in profiles),
        "idle": _join(f"{profile.idle_share:.1%}" for profile in profiles),
        "waits and copies": _join(waits),
        "most time in": top.replace("|", "/"),
    }


def _join(texts: Iterator[str]) -> str:
    return " / ".join(texts)
