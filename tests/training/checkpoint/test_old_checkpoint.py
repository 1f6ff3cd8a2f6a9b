"""Checkpoints of earlier versions of the project, kept in fixtures/, continue with today's code as they continued with
those versions."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.cases import Case, train_run
from support.old_checkpoints import FIXTURES, KEYS, OLD_RUNS, SAVED_STEP, STEPS, TRAIN_FILE
from support.workers import WorkerGroup

BOUND = 1e-5  # relative, fp32
ONE_STAGE = ("num_stages=1", "partition_method=balanced")
# Not for adamw_8bit: at another layout its blocks are quantized again (test_resume_state.py)
OTHER_LAYOUTS = {
    "adamw": (1, ONE_STAGE),
    "zero_bubble": (1, (*ONE_STAGE, "schedule=1f1b")),
    "zero_2": (2, (*ONE_STAGE, "zero_stage=3")),
}


@pytest.mark.parametrize("name", OLD_RUNS)
def test_it_resumes_with_the_losses_and_norms_of_that_version(
    workers: Callable[[int], WorkerGroup], tmp_path: Path, name: str
) -> None:
    check(workers, tmp_path, name, OLD_RUNS[name].world_size, ())


@pytest.mark.full
@pytest.mark.parametrize("name", OTHER_LAYOUTS)
def test_it_resumes_at_another_layout(workers: Callable[[int], WorkerGroup], tmp_path: Path, name: str) -> None:
    check(workers, tmp_path, name, *OTHER_LAYOUTS[name])


def check(
    workers: Callable[[int], WorkerGroup], tmp_path: Path, name: str, world_size: int, changes: tuple[str, ...]
) -> None:
    shutil.copytree(FIXTURES / name / "checkpoints", tmp_path / "out" / "checkpoints")
    overrides = ("resume=latest", *OLD_RUNS[name].list_overrides(), *changes)
    case = Case(Path("not there"), TRAIN_FILE, tmp_path, world_size=world_size, overrides=overrides)
    workers(world_size).run(train_run, case)
    expected, found = read_metrics(FIXTURES / name), read_metrics(tmp_path / "out")
    assert [record["step"] for record in found] == list(range(SAVED_STEP + 1, STEPS + 1))
    for record, before in zip(found, expected, strict=True):
        assert record == pytest.approx(before, rel=BOUND), f"step {before['step']}"


def read_metrics(folder: Path) -> list[dict[str, float]]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: record[key] for key in KEYS} for record in records]
