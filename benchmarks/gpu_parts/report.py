"""Prints each row while a part runs, and writes the report: report.json, report.md, and logs/."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path

from benchmarks.gpu_parts.machine import ROOT, Machine
from benchmarks.gpu_parts.rows import Result, Status


def choose_folder(machine: Machine, tiny: bool) -> Path:
    """Returns the folder of a report without --output: a real one is kept, also when another one is made on the same
    day; one that only shows that everything runs is not."""
    name = re.sub(r"[^a-z0-9]+", "-", machine.name.lower()).strip("-")
    is_kept = not (tiny or machine.is_cpu)
    first = ROOT / ("benchmarks/results" if is_kept else "outputs/gpu") / f"{name}-{date.today().isoformat()}"
    others = (first.with_name(f"{first.name}-{number}") for number in itertools.count(2))
    return next(folder for folder in itertools.chain([first], others) if not (is_kept and folder.exists()))


def render_line(result: Result, columns: Sequence[str]) -> str:
    """A row as it is shown and written: a line of a Markdown table."""
    if result.status in (Status.ok, Status.wrong, Status.measured):
        cells = [result.cells.get(column, "-") for column in columns]
    else:
        cells = ["-"] * len(columns)
    verdict = result.status.value + (f": {one_line(result.note)}" if result.note else "")
    return f"| {' | '.join([result.name, *cells, verdict, f'{result.seconds:.0f} s'])} |"


def one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "/")[:200]


def render_header(columns: Sequence[str]) -> list[str]:
    names = ["row", *columns, "verdict", "took"]
    return [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]


class Report:
    """The report of all parts, rewritten after each row, so that an interrupted report has all completed rows."""

    def __init__(self, folder: Path, machine: Machine, arguments: dict[str, object]) -> None:
        self.folder, self._machine, self._arguments = folder, machine, arguments
        self._parts: dict[str, tuple[str, tuple[str, ...], list[Result]]] = {}
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def is_bad(self) -> bool:
        return any(result.status.is_bad for _, _, results in self._parts.values() for result in results)

    def begin(self, part: str, title: str, columns: Sequence[str]) -> None:
        self._parts[part] = (title, tuple(columns), [])
        print("\n".join(["", f"## {title}", "", *render_header(columns)]), flush=True)

    def add(self, part: str, result: Result) -> None:
        _, columns, results = self._parts[part]
        results.append(result)
        print(render_line(result, columns), flush=True)
        if result.status.is_bad and result.tail:
            print("\n".join(f"    {line}" for line in result.tail.splitlines()), flush=True)
        self.write()

    def write(self) -> None:
        (self.folder / "report.md").write_text(self.render())
        parts = {
            part: [{**asdict(result), "status": result.status.value} for result in results]
            for part, (_, _, results) in self._parts.items()
        }
        machine = asdict(self._machine)
        machine["cards"] = len(machine.pop("gpus"))
        document = {"machine": machine, "arguments": self._arguments, "parts": parts}
        (self.folder / "report.json").write_text(json.dumps(document, indent=1) + "\n")

    def render(self) -> str:
        lines = ["# GPU report", "", f"{date.today().isoformat()}; {self._machine.describe()}"]
        for title, columns, results in self._parts.values():
            lines += ["", f"## {title}", "", *render_header(columns)]
            lines += [render_line(result, columns) for result in results]
            for result in results:
                if result.tail:
                    lines += ["", f"### {result.name}: {result.status.value}", "", "```", result.tail, "```"]
        return "\n".join(lines) + "\n"
