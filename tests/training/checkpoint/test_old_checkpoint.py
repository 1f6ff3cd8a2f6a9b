"""A checkpoint of an earlier version of the project, kept in fixtures/, continues with today's code as it continued
with that version's."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.cases import Case, train_run
from support.workers import WorkerGroup

FIXTURES = Path(__file__).parent / "fixtures"
BOUND = 1e-5  # relative, fp32
KEYS = ("step", "loss", "grad_norm", "learning_rate", "num_tokens")
# As in fixtures/README.md. All other keys have the defaults of conf/base.yaml, then as now.
RUN = (
    "resume=latest",
    "global_batch_size=4",
    "max_seq_length=160",
    "optimizer=adamw",
    "learning_rate=0.01",
    "lr_scheduler_type=cosine",
    "warmup_ratio=0.03",
    "max_grad_norm=1.0",
    "activation_checkpoint_interval=1",
    "max_steps=6",
    "logging_steps=1",
    "seed=7",
)


@pytest.mark.parametrize("num_stages, bounds", [(2, "[2,3]"), (1, "balanced")], ids=["pp2", "pp1"])
def test_it_resumes_with_the_losses_and_norms_of_that_version(
    workers: Callable[[int], WorkerGroup], tmp_path: Path, num_stages: int, bounds: str
) -> None:
    shutil.copytree(FIXTURES / "checkpoints", tmp_path / "out" / "checkpoints")
    overrides = (*RUN, f"partition_method={bounds}")
    case = Case(Path("not there"), FIXTURES / "train.jsonl", tmp_path, num_stages, num_stages, overrides=overrides)
    workers(num_stages).run(train_run, case)
    expected, found = read_metrics(FIXTURES), read_metrics(tmp_path / "out")
    assert [record["step"] for record in found] == [4, 5, 6]
    for record, before in zip(found, expected, strict=True):
        assert record == pytest.approx(before, rel=BOUND), f"step {before['step']}"


def read_metrics(folder: Path) -> list[dict[str, float]]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: record[key] for key in KEYS} for record in records]
