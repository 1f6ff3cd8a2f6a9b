"""Trackio. Its database is TRACKIO_DIR, offline `output_dir/trackio`; `trackio show` opens it. TRACKIO_SPACE_ID or
TRACKIO_SERVER_URL name a page online, which HF_TOKEN writes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from training.trackers.tracker import TrackedRun, Tracker


class TrackioTracker(Tracker):
    package = "trackio"

    def start(self, run: TrackedRun, params: Mapping[str, Any]) -> str:
        if run.offline:
            os.environ["TRACKIO_DIR"] = str((run.output_dir / "trackio").absolute())
            for online in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
                os.environ.pop(online, None)
        import trackio

        # A run is found again by its name, which two runs may share without the id.
        name = self._name = f"{run.name}-{run.id[:8]}"
        self._run = trackio.init(
            project=run.project, name=name, group=run.group, config=dict(params), resume="allow", embed=False,
            auto_log_gpu=False, auto_log_cpu=False,
        )  # fmt: skip
        place = f"TRACKIO_DIR={os.environ['TRACKIO_DIR']} " if "TRACKIO_DIR" in os.environ else ""
        return f"run {name}; {place}trackio show --project {run.project}"

    def log_metrics(self, figures: Mapping[str, float], step: int) -> None:
        self._run.log(dict(figures), step=step)

    def log_file(self, file: Path) -> None:
        self._run.log_artifact(file, name=f"{self._name}-{file.name}", type="run")

    def close(self) -> None:
        self._run.finish()
