"""Comet. Offline it writes a file to `output_dir/comet/`; later `comet upload`. A login is `comet login` or
COMET_API_KEY."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from training.trackers.tracker import TrackedRun, Tracker, flatten


class CometTracker(Tracker):
    package = "comet_ml"

    def start(self, run: TrackedRun, params: Mapping[str, Any]) -> str:
        import comet_ml

        folder = run.output_dir / "comet"
        folder.mkdir(parents=True, exist_ok=True)
        # What it would collect by itself is what metrics.jsonl and run.json hold.
        config = comet_ml.ExperimentConfig(
            name=run.name, tags=[run.kind, *([run.group] if run.group else [])], offline_directory=str(folder),
            log_code=False, log_graph=False, parse_args=False, log_env_details=False, log_git_metadata=False,
            log_git_patch=False, auto_output_logging="", auto_param_logging=False, auto_metric_logging=False,
            auto_log_co2=False, display_summary_level=0,
        )  # fmt: skip
        continues = run.offline and run.is_resumed  # else the later upload would find the key taken
        self._experiment = comet_ml.start(
            project_name=run.project, experiment_key=run.id, online=not run.offline,
            mode="get" if continues else "get_or_create", experiment_config=config,
        )  # fmt: skip
        self._experiment.log_parameters(flatten(params))
        return f"offline; later: comet upload {folder}/*.zip" if run.offline else str(self._experiment.url)

    def log_metrics(self, figures: Mapping[str, float], step: int) -> None:
        self._experiment.log_metrics(dict(figures), step=step)

    def log_file(self, file: Path) -> None:
        self._experiment.log_asset(str(file), file_name=file.name, overwrite=True)

    def close(self) -> None:
        self._experiment.end()
