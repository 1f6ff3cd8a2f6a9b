"""MLflow. Online it logs to MLFLOW_TRACKING_URI (of which MLflow's own variables say how to log in); offline to the
folder `output_dir/mlruns`. A run is found again by a tag that holds its id."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from training.trackers.tracker import TrackedRun, Tracker, flatten

ID_TAG = "llm_pipeline.run_id"
MOST_OF_PARAM = 6000  # characters, the limit of MLflow


class MlflowTracker(Tracker):
    package = "mlflow"

    def start(self, run: TrackedRun, params: Mapping[str, Any]) -> str:
        # MLflow would try for 20 minutes to reach a server that does not answer, while no rank trains
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")  # seconds
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
        if run.offline:
            # MLflow (3.7 and later) opens a folder only if this is set, and recommends a database for servers.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow import MlflowClient

        self._client = MlflowClient(
            tracking_uri=(run.output_dir / "mlruns").absolute().as_uri() if run.offline else None
        )
        experiment = self._client.get_experiment_by_name(run.project)
        where = experiment.experiment_id if experiment is not None else self._client.create_experiment(run.project)
        found = self._client.search_runs([where], f"tags.`{ID_TAG}` = '{run.id}'", max_results=1)
        if found:
            self._id = found[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
        else:
            tags = {ID_TAG: run.id, "kind": run.kind, **({"group": run.group} if run.group else {})}
            self._id = self._client.create_run(where, run_name=run.name, tags=tags).info.run_id
            for name, value in flatten(params).items():  # a parameter cannot be changed afterwards
                self._client.log_param(self._id, name, str(value)[:MOST_OF_PARAM])
        return f"run {self._id} of experiment {run.project}, {self._client.tracking_uri}"

    def log_metrics(self, figures: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = round(1000 * time.time())
        metrics = [Metric(name, value, now, step) for name, value in figures.items()]
        self._client.log_batch(self._id, metrics)  # one request

    def log_file(self, file: Path) -> None:
        self._client.log_artifact(self._id, str(file))

    def close(self) -> None:
        self._client.set_terminated(self._id)
