"""SwanLab. Offline it writes to `output_dir/swanlog/`; later `swanlab sync`. A login is `swanlab login` or
SWANLAB_API_KEY."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from training.trackers.tracker import TrackedRun, Tracker


class SwanLabTracker(Tracker):
    package = "swanlab"

    def start(self, run: TrackedRun, params: Mapping[str, Any]) -> str:
        import swanlab

        self._folder = run.output_dir
        folder = run.output_dir / "swanlog"
        folder.mkdir(parents=True, exist_ok=True)
        self._run = swanlab.init(
            project=run.project, name=run.name, mode="offline" if run.offline else "online", log_dir=str(folder),
            config=dict(params), id=run.id, resume="allow", job_type=run.kind, group=run.group,
        )  # fmt: skip
        return f"offline; later: swanlab sync {self._run.dir}" if run.offline else str(self._run.url)

    def log_metrics(self, figures: Mapping[str, float], step: int) -> None:
        self._run.log(dict(figures), step=step)

    def log_file(self, file: Path) -> None:
        self._run.save(str(file.absolute()), base_path=str(self._folder.absolute()), policy="now")

    def close(self) -> None:
        self._run.finish()
