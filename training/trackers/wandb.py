"""Weights & Biases. Offline it writes to `output_dir/wandb/`; later `wandb sync`. A login is `wandb login` or
WANDB_API_KEY."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from training.trackers.tracker import TrackedRun, Tracker


class WandbTracker(Tracker):
    package = "wandb"

    def start(self, run: TrackedRun, params: Mapping[str, Any]) -> str:
        import wandb

        self._folder = run.output_dir
        self._run = wandb.init(
            project=run.project, name=run.name, mode="offline" if run.offline else "online",
            dir=str(run.output_dir), config=dict(params), id=run.id, resume="allow", job_type=run.kind,
        )  # fmt: skip
        return self._run.url or f"offline; later: wandb sync {Path(self._run.dir).parent}"

    def log_metrics(self, figures: Mapping[str, float], step: int) -> None:
        self._run.log(dict(figures), step=step)

    def log_file(self, file: Path) -> None:
        self._run.save(str(file), base_path=str(self._folder), policy="now")

    def close(self) -> None:
        self._run.finish()
