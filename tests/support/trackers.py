"""A run in a tracker, offline, and what the tracker's own package reads back. A program: NAME FOLDER; it writes
JSON into the folder. With a third word, `read`, it only reads what a run has left there.

A process of its own, since some of these packages keep threads and settings for as long as a process lives.
"""

from __future__ import annotations

import base64
import json
import os
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

FACTS = {
    "config": {"learning_rate": 0.5, "data": {"name": "sft"}},
    "environment": {"python": "3"},
    "plan_table": "stage  layers\n    0     0-3",
}
RECORDS = [{"step": 1, "loss": 2.5, "wait_time": [0.5, 0.25]}, {"step": 2, "loss": 2.25}, {"step": 2, "eval_loss": 2.0}]
# What a run logs, with the step that it starts from: a run, the same one resumed, an evaluation.
RUNS: list[tuple[list[dict[str, Any]], int | None]] = [
    (RECORDS, 0),
    ([{"step": 3, "loss": 2.0}], 2),
    ([{"step": 3, "eval_loss": 1.5}], None),
]
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="  # a PNG
HELD = "held.json"
Held = dict[str, Any]  # id, points: figure -> [[step, value], ...], params: dotted name -> value, files


def read_wandb(out: Path) -> list[Held]:
    """From the transaction log that `wandb sync` sends."""
    from wandb.proto import wandb_internal_pb2

    held = []
    for folder in sorted((out / "wandb").glob("offline-run-*"), key=lambda folder: folder.stat().st_ctime):
        (file,) = folder.glob("*.wandb")
        deadline = time.monotonic() + 10  # another process writes it
        while b"loss" not in file.read_bytes() and time.monotonic() < deadline:
            time.sleep(0.1)
        found: Held = {"id": "", "points": {}, "params": {}, "files": []}
        for data in read_leveldb_log(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.HasField("run"):
                found["id"] = record.run.run_id
                found["params"] |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
            if record.HasField("history"):
                row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
                for key in row:
                    if not key.startswith("_"):
                        found["points"].setdefault(key, []).append([row["_step"], row[key]])
            if record.HasField("files"):
                found["files"] += [file.path for file in record.files.files]
        held.append(found)
    return held


def read_leveldb_log(content: bytes) -> Iterator[bytes]:
    """Yield the records of a log in LevelDB's format, after the seven bytes that wandb puts first: blocks of 32 KiB
    with checksum, length, and whether it is a whole record (1), or its first (2), a middle (3) or its last part (4)."""
    at, record = 7, b""
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        record = content[at + 7 : at + 7 + length] if kind in (1, 2) else record + content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield record


def read_tensorboard(out: Path) -> list[Held]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(out / "tensorboard"))
    events.Reload()
    tags = events.Tags()
    texts = {
        tag.removesuffix("/text_summary"): events.Tensors(tag)[0].tensor_proto.string_val[0].decode()
        for tag in tags["tensors"]
    }
    params = {
        name: json.loads(text.removeprefix("```json\n").removesuffix("\n```")) if text.startswith("```json") else text
        for name, text in texts.items()
    }
    points = {tag: [[event.step, event.value] for event in events.Scalars(tag)] for tag in tags["scalars"]}
    return [{"id": "", "points": points, "params": params, "files": tags["images"]}]


def read_mlflow(out: Path) -> list[Held]:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=(out / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("llm-pipeline")
    held = []
    for run in client.search_runs([experiment.experiment_id], order_by=["attributes.start_time"]):
        key = run.info.run_id
        points = {
            name: [[point.step, point.value] for point in client.get_metric_history(key, name)]
            for name in run.data.metrics
        }
        files = [file.path for file in client.list_artifacts(key)]
        held.append({"id": key, "points": points, "params": run.data.params, "files": files})
    return held


def read_trackio(out: Path) -> list[Held]:
    from trackio.sqlite_storage import SQLiteStorage

    held = []
    for name in SQLiteStorage.get_runs("llm-pipeline"):
        points: dict[str, list[Any]] = {}
        for row in SQLiteStorage.get_logs("llm-pipeline", name):
            for key in row.keys() - {"step", "timestamp"}:
                points.setdefault(key, []).append([row["step"], row[key]])
        names = [artifact["name"] for artifact in SQLiteStorage.list_artifacts("llm-pipeline")]
        files = [artifact.removeprefix(f"{name}-") for artifact in names if artifact.startswith(name)]
        config = SQLiteStorage.get_run_config("llm-pipeline", name)
        held.append({"id": name, "points": points, "params": config, "files": files})
    return held


def read_swanlab(out: Path) -> list[Held]:
    import yaml
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    held = []
    for file in sorted((out / "swanlog").glob("*/*.swanlab"), key=lambda file: file.stat().st_ctime):
        reader = DataStoreReader()
        reader.open(str(file))
        found: Held = {"id": file.stem, "points": {}, "params": {}, "files": []}
        while (data := reader.scan()) is not None:
            record = Record()
            record.ParseFromString(data)
            if record.HasField("scalar") and not record.scalar.key.startswith("__"):
                point = [record.scalar.step, record.scalar.value.number]
                found["points"].setdefault(record.scalar.key, []).append(point)
            if record.HasField("save"):
                found["files"].append(record.save.name)
        config = yaml.safe_load((file.parent / "files" / "config.yaml").read_text())
        found["params"] = {name: entry["value"] for name, entry in config.items()}
        held.append(found)
    return held


def read_comet(out: Path) -> list[Held]:
    held = []
    for file in sorted((out / "comet").glob("*.zip"), key=lambda file: file.stat().st_ctime):
        with zipfile.ZipFile(file) as archive:
            experiment = json.loads(archive.read("experiment.json"))
            lines = [json.loads(line) for line in archive.read("messages.json").decode().splitlines()]
        found: Held = {"id": experiment["offline_id"], "points": {}, "params": {}, "files": []}
        for line in lines:
            payload = line["payload"]
            if line["type"] == "metric_msg":
                metric = payload["metric"]
                if metric["metricName"] != "process duration":  # its own, logged when a run ends
                    found["points"].setdefault(metric["metricName"], []).append([metric["step"], metric["metricValue"]])
            elif line["type"] == "parameter_msg" and payload.get("param"):
                found["params"][payload["param"]["paramName"]] = payload["param"]["paramValue"]
            elif payload.get("additional_params", {}).get("fileName"):
                found["files"].append(payload["additional_params"]["fileName"])
        held.append(found)
    return held


READERS: dict[str, Callable[[Path], list[Held]]] = {
    "wandb": read_wandb, "tensorboard": read_tensorboard, "mlflow": read_mlflow, "trackio": read_trackio,
    "swanlab": read_swanlab, "comet": read_comet,
}  # fmt: skip


def main(name: str, out: Path) -> None:
    from support.configs import build_config

    from training.observability.loggers import build_loggers
    from training.observability.metrics import Event

    config = build_config(f"logger={name}", "logger.mode=offline").logger
    (out / "run.json").write_text("{}")
    (out / "report.html").write_text("<html>")
    (out / "step_2.png").write_bytes(base64.b64decode(PIXEL))
    snapshots = []
    for records, first_step in RUNS:
        (logger,) = build_loggers(config, out, FACTS, first_step)
        for record in records:
            logger.report(record)
        logger.note(Event(2, "picture", "step_2.png"))
        logger.close()
        snapshots.append(READERS[name](out))
    (out / HELD).write_text(json.dumps(_arrange(snapshots)))  # these packages print when a process ends, too


def read(name: str, out: Path) -> None:
    os.environ |= {"TRACKIO_DIR": str(out / "trackio"), "MLFLOW_ALLOW_FILE_STORE": "true"}  # as the trackers set them
    (out / HELD).write_text(json.dumps(READERS[name](out)))


def _arrange(snapshots: Sequence[Sequence[Held]]) -> list[Held]:
    """Return what each of the three runs left. Where a tracker keeps runs apart, a snapshot has one more of them than
    the one before, or the resumed run is in the same one; TensorBoard has one folder for all."""
    first, second, third = snapshots
    one_place = len(third) == 1
    held = [dict(first[0]), dict(second[-1]), dict(third[-1])]
    if one_place:
        for number, each in enumerate(held):
            each["id"] = "evaluation" if number == 2 else "run"
    for each in held:
        each["params"] = _flatten(each["params"])
    return held


def _flatten(params: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in params.items():
        flat |= _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


if __name__ == "__main__":
    (read if sys.argv[3:] == ["read"] else main)(sys.argv[1], Path(sys.argv[2]))
