"""docs/add_a_head.md as written: its head is the one in the tree, and its objective trains it on two stages and leaves
what `transformers` loads."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
import torch
from support import objective_runs
from support.cases import ROOT, Case, train_run
from support.head_runs import pad_documents, save_documents
from support.objective_runs import check_record, find_dataset
from support.tiny import save_llama, save_tokenizer
from support.workers import WorkerGroup
from transformers import AutoModelForSequenceClassification

from models.heads.sequence_classification import SEQUENCE_CLASSIFICATION
from training.objectives.registry import OBJECTIVES

PAGE = (ROOT / "docs" / "add_a_head.md").read_text()
MODULE = "page_share"  # of its objective, in a folder of the test


def read_blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def train_with(folder: Path, case: Case) -> None:
    """Train with the objective in `folder`, which is in the table meanwhile."""
    sys.path.insert(0, str(folder))
    try:
        OBJECTIVES["share"] = import_module(MODULE).Share()
        train_run(case)
    finally:
        sys.path.remove(str(folder))
        OBJECTIVES.pop("share", None)


def test_the_head_is_that_of_the_tree() -> None:
    found: dict[str, object] = {}
    exec(read_blocks("python")[0], found)
    assert found["SEQUENCE_CLASSIFICATION"] == SEQUENCE_CLASSIFICATION
    assert (ROOT / "models" / "heads" / "sequence_classification.py").read_text().endswith(read_blocks("python")[0])


@pytest.mark.parametrize("overrides", [(), pytest.param(("data.packing=true",), marks=pytest.mark.full)])
def test_the_objective_learns_and_its_model_is_loaded(
    workers: Callable[[int], WorkerGroup], tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    (tmp_path / f"{MODULE}.py").write_text(read_blocks("python")[1])
    save_llama(tmp_path / "tiedFalse")
    save_tokenizer(tmp_path / "tiedFalse")
    records = [json.loads(line) for line in save_documents(tmp_path / "texts.jsonl", 21).read_text().splitlines()]
    shares = [{"text": record["text"], "share": record["text"].count("e") / len(record["text"])} for record in records]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in shares))
    (command,) = read_blocks("text")
    given = (
        *command.split(), f"eval_file={tmp_path}/train.jsonl", "eval_on_start=true", "logging_steps=1", "max_steps=4",
        "optimizer=adamw", "learning_rate=3e-3", *overrides,
    )  # fmt: skip
    workers(2).run(train_with, tmp_path, objective_runs.build_case(tmp_path, tmp_path, "pp2", *given))

    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["eval_loss"] < lines[0]["eval_loss"] and lines[-1]["eval_error"] < lines[0]["eval_error"]
    dataset = find_dataset(tmp_path)
    model, report = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "out" / "hf", dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values()), report
    batch = pad_documents([dataset.input_ids(i) for i in range(len(dataset))], model.config.pad_token_id)
    labels = torch.tensor([[record["share"]] for record in shares])
    with torch.no_grad():
        found = model.eval()(**batch, labels=labels, use_cache=False)
    error = (found.logits.sigmoid() - labels).abs().mean().item()
    check_record(lines[-1], {"eval_loss": found.loss.item(), "eval_error": error})
