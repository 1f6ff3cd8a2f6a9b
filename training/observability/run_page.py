"""`output_dir/report.html`: a run to look at in a browser. One file, without server or network; it is written again at
evaluations and saves, and holds several runs when `scripts/report.py` compares them. Main rank only.
"""

from __future__ import annotations

import base64
import json
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

from errors import UserError
from filesystem import write_page
from masking import mask
from training.checkpoint.run_folder import RunFolder
from training.observability.curves import Curve
from training.observability.metrics import PER_SECOND, Event, Record, Reporter, split_stages

TEMPLATE = Path(__file__).with_suffix(".html")
SAMPLES = "samples.jsonl"  # in output_dir: prompts and answers, as `scripts/generate.py --output` writes them
MOST_EVENTS, MOST_SAMPLES, MOST_PICTURES, MOST_SKIPPED = 500, 20, 2, 100  # events: of each kind


class Means:
    """The mean over the steps of a run, or over their time, of each figure that is measured over steps, without its
    first report if there are others: it is warm-up. The table that a run ends with (`render_summary`) counts
    in the same way."""

    def __init__(self) -> None:
        self._first: Record = {}
        self._num_tokens = 0
        self._sums: dict[str, tuple[float, float]] = {}  # key -> sum over steps or seconds, their number

    def add(self, record: Record) -> None:
        needed: list[Any] = [record.get(key) for key in ("num_tokens", "tokens_per_second", "step_time")]
        if not all(_is_number(value) and value > 0 for value in needed):
            return  # an evaluation, or a damaged line
        num_tokens, rate, step_time = needed
        num_steps = (num_tokens - self._num_tokens) / rate / step_time
        self._num_tokens = num_tokens
        figures = {key: value for key, value in split_stages(record).items() if _is_number(value)}
        if not self._first:
            self._first = figures
        elif num_steps > 0:
            for key, value in figures.items():
                weight = num_steps * (step_time if key in PER_SECOND else 1.0)
                total, weights = self._sums.get(key, (0.0, 0.0))
                self._sums[key] = total + weight * value, weights + weight

    def describe(self) -> dict[str, float]:
        """Return the means, each figure of a stage under a key such as `stage0/wait_time`."""
        return {key: total / weights for key, (total, weights) in self._sums.items()} or self._first


class RunHistory(Reporter):
    """The curves, last figures and latest events of a run, in memory that does not grow with its length."""

    def __init__(self) -> None:
        self.curves: dict[str, Curve] = {}
        self.last: Record = {}
        self.means = Means()
        self._events: dict[str, deque[Event]] = {}  # by kind: saves do not push out what happens seldom

    @property
    def events(self) -> list[Event]:
        """The latest events of each kind, in their order."""
        return sorted((event for kept in self._events.values() for event in kept), key=lambda event: event.time)

    def report(self, record: Record) -> None:
        self.last |= record
        self.means.add(record)
        for key, value in split_stages(record).items():
            # What the plan predicts is the same in each report: the last one is enough.
            if key != "step" and not key.rpartition("/")[2].startswith("predicted_") and _is_number(value):
                self.curves.setdefault(key, Curve()).add(record["step"], value)

    def note(self, event: Event) -> None:
        self._events.setdefault(event.kind, deque(maxlen=MOST_EVENTS)).append(event)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def read_history(folder: RunFolder) -> RunHistory:
    """Return what the files of a run say. Raises UserError where there are none."""
    if not folder.metrics.is_file():
        raise UserError(f"{folder.path} has no metrics.jsonl; give the output_dir of a run that has trained")
    history = RunHistory()
    for record in read_lines(folder.metrics):
        if isinstance(record.get("step"), int):
            history.report(record)
    for event in read_lines(folder.events):
        if event.keys() == Event.__dataclass_fields__.keys():
            history.note(Event(**event))
    return history


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Return the records of a file of JSON lines; none where it is missing. A line may be half written."""
    records = []
    for line in file.read_bytes().split(b"\n") if file.is_file() else []:  # a text has more ends of lines than JSON
        with suppress(ValueError):
            records.append(json.loads(line))
    return [record for record in records if isinstance(record, dict)]


class RunPage(Reporter):
    """The page of a run that is training. It is written at its first report, at evaluations, saves and the end."""

    def __init__(self, folder: RunFolder, first_step: int) -> None:
        """folder: its files hold the first `first_step` steps."""
        self._folder = folder
        self._history = read_history(folder) if first_step else RunHistory()
        self._is_written = False

    def report(self, record: Record) -> None:
        self._history.report(record)
        if "eval_loss" in record or not self._is_written:
            self._write()

    def note(self, event: Event) -> None:
        self._history.note(event)
        if event.kind == "save":
            self._write()

    def close(self) -> None:
        self._write()

    def _write(self) -> None:
        write_run_page(self._folder.report, [(self._folder, self._history)])
        self._is_written = True


def write_run_page(file: Path, runs: Sequence[tuple[RunFolder, RunHistory]]) -> None:
    """Write the page of one run, or of several to compare."""
    names = _name_runs([folder for folder, _ in runs])
    described = [_describe(name, folder, history) for name, (folder, history) in zip(names, runs, strict=True)]
    write_page(file, TEMPLATE, {"written": time.strftime("%Y-%m-%d %H:%M:%S"), "runs": described})


def _name_runs(folders: Sequence[RunFolder]) -> list[str]:
    """Return the names of the folders, or their whole paths where two have the same name."""
    names = [folder.path.absolute().name for folder in folders]
    return names if len(set(names)) == len(names) else [str(folder.path) for folder in folders]


def _describe(name: str, folder: RunFolder, history: RunHistory) -> dict[str, Any]:
    samples = read_lines(folder.path / SAMPLES)
    return {
        "name": name,
        "facts": _read_json(folder.facts),
        "completed": _read_json(folder.completed) or None,
        "last": {key: value for key, value in history.last.items() if isinstance(value, list) or _is_number(value)},
        "means": history.means.describe(),
        "curves": {key: curve.describe() for key, curve in history.curves.items()},
        "events": [mask(asdict(event)) for event in history.events],
        "pictures": [_embed(picture) for picture in _list_pictures(folder, history)],
        "samples": samples[:MOST_SAMPLES],
        "num_samples": len(samples),
        "skipped": _read_first(folder.skipped, MOST_SKIPPED),
    }


def _read_json(file: Path) -> Mapping[str, Any]:
    """Return the object in a file; an empty one where it is missing, half written or damaged."""
    with suppress(OSError, ValueError):
        content = json.loads(file.read_bytes())
        return mask(content) if isinstance(content, dict) else {}  # an earlier version wrote secrets as well
    return {}


def _read_first(file: Path, count: int) -> list[str]:
    """Return the first lines of a text file; none where it is missing."""
    if not file.is_file():
        return []
    with open(file, encoding="utf-8", errors="replace") as lines:
        return [line.rstrip("\n") for line in islice(lines, count)]


def _list_pictures(folder: RunFolder, history: RunHistory) -> list[Path]:
    """Return the newest pictures of this run."""
    named = [folder.path / event.text for event in history.events if event.kind == "picture"]
    return [picture for picture in named if picture.is_file()][-MOST_PICTURES:]


def _embed(picture: Path) -> dict[str, str]:
    return {"name": picture.name, "src": f"data:image/png;base64,{base64.b64encode(picture.read_bytes()).decode()}"}
