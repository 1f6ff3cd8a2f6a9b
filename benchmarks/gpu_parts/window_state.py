"""Keeps the results of the items of `items.py`: state.json and report.md, rewritten after each item.

A result counts for the sources and the GPU that it was found with. Another call with the same folder leaves out what
the folder holds, and continues.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path

from benchmarks.gpu_parts.items import ITEMS, SECTIONS, Item, Section
from benchmarks.gpu_parts.machine import ROOT, Machine
from benchmarks.gpu_parts.report import one_line
from benchmarks.gpu_parts.rows import Result, Status

_SOURCES = ("*.py", "models/**/*.py", "data/**/*.py", "training/**/*.py", "benchmarks/**/*.py", "conf/**/*.yaml")
_COLUMNS = ("call", "item", "question", "expected", "result", "verdict", "took")


def hash_sources(root: Path = ROOT) -> str:
    """Returns a name for what is measured, which stays the same until a source or a config changes."""
    hashed = hashlib.sha256()
    for file in sorted({file for pattern in _SOURCES for file in root.glob(pattern)}):
        hashed.update(f"{file.relative_to(root)}\0".encode() + file.read_bytes())
    return hashed.hexdigest()[:12]


def plan_calls(sections: Sequence[Section], budget: float) -> dict[str, int]:
    """Returns the call, from 1, of `budget` seconds in which each item is expected to run, by its name."""
    calls, call, used = {}, 1, 0.0
    for section in sections:
        jobs = section.count_jobs()
        for item in section.items:
            if used and used + item.seconds > budget:
                call, used = call + 1, 0.0
            used += item.seconds / jobs
            calls[item.name] = call
    return calls


class State:
    """The results of the present sources on a machine, in a folder that keeps those of others too."""

    def __init__(self, folder: Path, machine: Machine, budget: float, tiny: bool) -> None:
        self._folder, self._machine, self._sources = folder, machine, hash_sources()
        self._calls = plan_calls(SECTIONS, budget)
        self._key = f"{self._sources} on {machine.name}{', tiny' if tiny else ''}"
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / "state.json"
        self._kept = json.loads(self._file.read_text()) if self._file.exists() else {}
        stored = [{**each, "status": Status(each["status"])} for each in self._kept.get(self._key, [])]
        self._results = {each["name"]: Result(**each) for each in stored}

    def is_done(self, name: str) -> bool:
        """Returns whether an item has a result; one that could not run has none, and is tried again."""
        return name in self._results and self._results[name].status is not Status.not_run

    @property
    def is_bad(self) -> bool:
        return any(result.status.is_bad for result in self._results.values())

    def add(self, result: Result) -> None:
        self._results[result.name] = result
        done = [each for each in self._results.values() if self.is_done(each.name)]
        self._kept[self._key] = [{**asdict(each), "status": each.status.value} for each in done]
        _write(self._file, json.dumps(self._kept, indent=1) + "\n")
        _write(self._folder / "report.md", self.render())

    def render(self) -> str:
        lines = [
            "# What a GPU shows in a quarter of an hour", "",
            f"{date.today().isoformat()}; {self._machine.describe()}; sources {self._sources}", "", self.render_table(),
        ]  # fmt: skip
        for result in self._results.values():
            if result.tail:
                lines += ["", f"## {result.name}: {result.status.value}", "", "```", result.tail, "```"]
        return "\n".join(lines) + "\n"

    def render_table(self) -> str:
        """Returns all items in their order, also those that have not run."""
        rows = [_COLUMNS, ("---",) * len(_COLUMNS), *map(self._list_cells, ITEMS)]
        return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)

    def _list_cells(self, item: Item) -> tuple[str, ...]:
        result = self._results.get(item.name, Result(item.name, Status.not_run))
        return (
            str(self._calls[item.name]), item.name, item.question, f"{item.seconds:.0f} s", describe_cells(result),
            describe_verdict(result), f"{result.seconds:.0f} s",
        )  # fmt: skip


def describe_cells(result: Result) -> str:
    return ", ".join(f"{name} {text}" for name, text in result.cells.items()).replace("|", "/") or "-"


def describe_verdict(result: Result) -> str:
    return result.status.value + (f": {one_line(result.note)}" if result.note else "")


def _write(file: Path, text: str) -> None:
    """A reader sees the text before or after, also when this process is killed."""
    part = file.with_name(f"{file.name}.part")
    part.write_text(text)
    os.replace(part, file)
