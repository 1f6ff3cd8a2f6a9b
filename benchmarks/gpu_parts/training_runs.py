"""Runs of the trainer's own command: what is measured is what runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_parts.machine import Machine
from benchmarks.gpu_parts.processes import TRAINER, Deadline, list_ranks, run

Record = dict[str, Any]  # a line of metrics.jsonl


def train(
    machine: Machine,
    overrides: Sequence[str],
    *,
    world_size: int,
    log: Path,
    deadline: Deadline,
    until: Callable[[], bool] | None = None,
    script: Path = TRAINER,
) -> float:
    """Runs it and returns its seconds. until, deadline: as in `processes.run`. script: what is started in each rank."""
    words = [sys.executable, str(script), *overrides]
    return run(list_ranks(machine, world_size, words), log, deadline, until)


def read_metrics(output_dir: Path) -> list[Record]:
    """The lines of a run's steps; none of a run that reported none."""
    file = output_dir / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [record for line in lines if "loss" in (record := json.loads(line))]


def write_name(name: str) -> str:
    """Returns the bytes of a file or folder."""
    return "".join(letter if letter.isalnum() else "_" for letter in name)
