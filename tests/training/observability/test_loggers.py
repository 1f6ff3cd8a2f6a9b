"""Curves and facts in Weights & Biases (offline) and TensorBoard, read back from the files that they write."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from training.config.schema import LoggerConfig, LoggerName, WandbMode
from training.observability.environment import describe_environment
from training.observability.loggers import build_loggers

FACTS = {
    "config": {"learning_rate": 0.5, "data": {"name": "sft"}},
    "environment": {"python": "3"},
    "plan": {"stage0": {"parameters": 7}},
    "plan_table": "stage  layers\n    0     0-3",
}
RECORDS = [{"step": 1, "loss": 2.5, "wait_time": [0.5, 0.25]}, {"step": 2, "loss": 2.25}, {"step": 2, "eval_loss": 2.0}]


def log(
    config: LoggerConfig,
    folder: Path,
    records: list[dict[str, Any]],
    first_step: int | None = 0,
    starts_over: bool = False,
) -> None:
    (logger,) = build_loggers(config, folder, FACTS, first_step, starts_over)
    for record in records:
        logger.report(record)
        logger.advance(int(record["step"]))
    logger.close()


def test_nothing_is_logged_elsewhere_unless_asked_for(tmp_path: Path) -> None:
    assert build_loggers(LoggerConfig(), tmp_path, FACTS, 0) == [] and list(tmp_path.iterdir()) == []


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


def read_offline_run(folder: Path) -> tuple[str, dict[str, object], list[dict[str, float]]]:
    """Return run id, config and history, from the transaction log that `wandb sync` sends."""
    from wandb.proto import wandb_internal_pb2

    (file,) = folder.glob("*.wandb")
    deadline = time.monotonic() + 10  # another process writes it
    while b"loss" not in file.read_bytes() and time.monotonic() < deadline:
        time.sleep(0.1)
    run_id, config, history = "", {}, []
    for data in read_leveldb_log(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.HasField("run"):
            run_id = record.run.run_id
            config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        if record.HasField("history"):
            items = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            history.append(
                {
                    key: value
                    for key, value in items.items()
                    if key in ("loss", "eval_loss", "_step") or key.startswith("stage")
                }
            )
    return run_id, config, history


def test_an_offline_run_of_weights_and_biases_holds_config_and_curves_and_keeps_its_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    config = LoggerConfig(name=LoggerName.wandb, mode=WandbMode.offline)
    log(config, tmp_path, RECORDS)
    log(config, tmp_path, [{"step": 3, "loss": 2.0}], first_step=2)
    log(config, tmp_path, [{"step": 3, "eval_loss": 1.5}], first_step=None)
    folders = sorted((tmp_path / "wandb").glob("offline-run-*"), key=lambda folder: folder.stat().st_ctime)
    first, second, evaluation = map(read_offline_run, folders)
    assert {name: first[1][name] for name in FACTS} == FACTS
    assert first[2] == [
        {"_step": 1, "loss": 2.5, "stage0/wait_time": 0.5, "stage1/wait_time": 0.25},
        {"_step": 2, "loss": 2.25, "eval_loss": 2.0},
    ]
    assert second[2] == [{"_step": 3, "loss": 2.0}] and evaluation[2] == [{"_step": 3, "eval_loss": 1.5}]
    assert first[0] == second[0] == (tmp_path / "wandb_run_id").read_text() != evaluation[0]
    log(config, tmp_path, RECORDS, starts_over=True)
    assert (tmp_path / "wandb_run_id").read_text() != first[0]
    assert build_loggers(LoggerConfig(), tmp_path, FACTS, 0, starts_over=True) == []
    assert not (tmp_path / "wandb_run_id").exists()


def test_tensorboard_holds_config_and_curves_and_drops_what_a_resumed_run_repeats(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = LoggerConfig(name=LoggerName.tensorboard)
    log(config, tmp_path, RECORDS)
    log(config, tmp_path, [{"step": 2, "loss": 1.0}, {"step": 3, "loss": 0.5}], first_step=1)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 2.5), (2, 1.0), (3, 0.5)]
    assert [event.value for event in events.Scalars("stage1/wait_time")] == [0.25]
    assert b'"learning_rate": 0.5' in events.Tensors("config/text_summary")[0].tensor_proto.string_val[0]
    assert b"\n    0     0-3\n" in events.Tensors("plan_table/text_summary")[0].tensor_proto.string_val[0]


def test_the_environment_names_versions_source_and_hosts() -> None:
    environment = describe_environment(["a", "a", "b"])
    assert (
        environment["hosts"] == {"a": 2, "b": 1}
        and {"torch", "deepspeed", "transformers"} <= environment["packages"].keys()
    )
    assert environment["git"] is None or len(environment["git"]) >= 7
    json.dumps(environment)


@pytest.mark.parametrize("with_gpu", [False, True])
def test_a_run_on_the_cpu_names_the_processor(monkeypatch: pytest.MonkeyPatch, with_gpu: bool) -> None:
    """pip's default wheel of torch on Linux names the accelerator that it was built for, with `check_available` only if
    there is one; DS_ACCELERATOR=cpu overrides it."""
    monkeypatch.setattr(
        "torch.accelerator.current_accelerator",
        lambda check_available=False: torch.device("cuda") if with_gpu or not check_available else None,
    )
    assert describe_environment(["a"])["device"]
