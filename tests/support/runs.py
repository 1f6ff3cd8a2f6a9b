"""Fixtures of whole runs in worker processes, and what such a run leaves."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.cases import Case, train_run
from support.tiny import find_tokenized, save_llama, save_records, save_tokenizer
from support.workers import WorkerGroup

from data.storage.tokenized import TokenizedDataset

# Fields that differ from run to run.
MEASURED = {
    "step_time", "tokens_per_second", "mfu", "compute_time", "exchange_time", "communication_time", "wait_time",
    "bubble", "predicted_bubble", "imbalance", "predicted_imbalance", "peak_memory",
}  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    for tied in (False, True):
        save_llama(root / f"tied{tied}", tied=tied)
        save_tokenizer(root / f"tied{tied}")
    save_records(root / "train.jsonl", 40)
    save_records(root / "eval.jsonl", 11, seed=1)  # no multiple of any batch
    return root


@pytest.fixture
def run(workers: Callable[[int], WorkerGroup], root: Path, tmp_path: Path) -> Callable[..., Path]:
    """run(name, num_stages, world_size, *overrides): a whole run; returns its output_dir."""

    def start(name: str, num_stages: int, world_size: int, *overrides: str, tied: bool = False) -> Path:
        return train(workers, root, tmp_path / name, num_stages, world_size, *overrides, tied=tied)

    return start


def train(
    workers: Callable[[int], WorkerGroup],
    root: Path,
    output_dir: Path,
    num_stages: int,
    world_size: int,
    *overrides: str,
    tied: bool = False,
) -> Path:
    """A whole run; returns its output_dir."""
    defaults = (
        f"output_dir={output_dir}", f"eval_file={root}/eval.jsonl", "optimizer=adamw", "learning_rate=1e-2",
        "max_grad_norm=1.0", "lr_scheduler_type=cosine", "warmup_ratio=0.5", "max_steps=4", "logging_steps=1",
    )  # fmt: skip
    case = Case(
        root / f"tied{tied}", root / "train.jsonl", root, num_stages, world_size, overrides=(*defaults, *overrides)
    )
    workers(world_size).run(train_run, case)
    return output_dir


@pytest.fixture(scope="module")
def finished(
    workers: Callable[[int], WorkerGroup], root: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """finished(num_stages, world_size, *overrides): as `run`, for tests that only read what it leaves: what a file has
    asked for once is not run again."""

    @cache
    def start(num_stages: int, world_size: int, *overrides: str, tied: bool = False) -> Path:
        out = tmp_path_factory.mktemp("finished") / "run"
        return train(workers, root, out, num_stages, world_size, *overrides, tied=tied)

    return start


def read_metrics(output_dir: Path, timed: bool = False) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
    return records if timed else [{k: v for k, v in r.items() if k not in MEASURED} for r in records]


def export_of(output_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(output_dir / "hf" / "model.safetensors")


def eval_dataset(root: Path) -> TokenizedDataset:
    return next(data for data in list_tokenized(root) if len(data) == 11)


def list_tokenized(root: Path) -> list[TokenizedDataset]:
    """Returns what the runs of a file have tokenized so far."""
    return [TokenizedDataset(folder, True, True) for folder in find_tokenized(root)]
