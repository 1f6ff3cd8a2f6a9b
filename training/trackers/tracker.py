"""The interface of a tracker, such as Weights & Biases: what every one of them gets, and what a run asks of it.

A tracker is a file here and a file in `conf/logger/`; one of a user is any class with these methods, named by
`_target_`. All calls are made by the main rank, each tracker isolated from the run (training/observability/loggers.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

METHODS = ("start", "log_metrics", "log_file", "close")


@dataclass(frozen=True)
class TrackedRun:
    """A run as a tracker knows it.

    id: 32 hexadecimal digits, the same whenever the run is resumed, unless that sets steps aside; an evaluation has its
    own. group: of a sweep.
    offline: write below output_dir, and use no network. first_step: the step that the run continues from; None for an
    evaluation. is_resumed: whether a run of this id was started before.
    """

    output_dir: Path
    id: str
    name: str
    project: str
    group: str | None
    offline: bool
    first_step: int | None
    is_resumed: bool

    @property
    def kind(self) -> str:
        return "evaluate" if self.first_step is None else "train"


class Tracker:
    """A tracker. The fields of its config are the arguments of its constructor, which has no side effects.

    package: the module that it imports, in `start` and not before; pip's name of it has hyphens for underscores.
    """

    package: ClassVar[str | None] = None

    def start(self, run: TrackedRun, params: Mapping[str, Any]) -> str:
        """Start the run there, or continue it, and return where to look. params: config, environment, plan, ...:
        values or text, ready for JSON, known before the first step."""
        raise NotImplementedError

    def log_metrics(self, figures: Mapping[str, float], step: int) -> None:
        """Log the figures of a step; those of a stage are named `stage0/wait_time`."""
        raise NotImplementedError

    def log_file(self, file: Path) -> None:
        """Keep a file of output_dir there: run.json, plan.txt, step_N.png, and report.html at the end."""
        raise NotImplementedError

    def close(self) -> None:
        """End the run there, and wait until all is sent."""


def flatten(params: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested mappings by their dotted names."""
    flat: dict[str, Any] = {}
    for key, value in params.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat
