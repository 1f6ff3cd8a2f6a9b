"""A run compares the bytes of what is cached before it trains on it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from support.cases import Case, train_run
from support.tiny import save_llama, save_records, save_tokenizer
from support.workers import WorkerGroup


def read_losses(out: Path) -> list[float]:
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


def test_damaged_tokens_are_made_again(workers: Callable[[int], WorkerGroup], tmp_path: Path) -> None:
    save_llama(tmp_path / "model", num_hidden_layers=1)
    save_tokenizer(tmp_path / "model")
    save_records(tmp_path / "train.jsonl", 12)

    def train(name: str) -> list[float]:
        overrides = (f"output_dir={tmp_path}/{name}", f"data.cache_dir={tmp_path}/cache", "save_final=false")
        case = Case(tmp_path / "model", tmp_path / "train.jsonl", tmp_path, 1, 1, 2)
        workers(1).run(train_run, replace(case, overrides=(*case.overrides, *overrides, "logging_steps=1")))
        return read_losses(tmp_path / name)

    losses = train("first")
    (file,) = (tmp_path / "cache").glob("*/input_ids.bin")
    whole = file.read_bytes()
    file.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    assert train("second") == losses and len(losses) == 2
    assert file.read_bytes() == whole
