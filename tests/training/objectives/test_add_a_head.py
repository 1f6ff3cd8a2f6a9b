"""docs/add_a_head.md as written: its head is the one in the tree, and its one file, with a kind of data, a column, a
loss, a metric and a pass before each step, trains it on two stages, leaves what `transformers` loads, and can be
removed again."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import pytest
import torch
from support import objective_runs
from support.cases import ROOT, Case, train_run
from support.configs import build_config
from support.head_runs import pad_documents, save_documents
from support.objective_runs import check_record, find_dataset
from support.tiny import save_llama, save_tokenizer
from support.workers import WorkerGroup
from torch.nn import functional as F
from transformers import AutoModelForSequenceClassification

from data.encoders.kinds import KINDS
from errors import UserError
from models.heads.sequence_classification import SEQUENCE_CLASSIFICATION
from training.objectives.registry import OBJECTIVES, check_objective, get_objective

PAGE = (ROOT / "docs" / "add_a_head.md").read_text()
MODULE = "page_share"  # of its objective, in a folder of the test


def read_blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@contextmanager
def added(folder: Path) -> Iterator[None]:
    """Import the page's file from `folder`, and remove what it enters in the tables afterwards."""
    sys.path.insert(0, str(folder))
    try:
        import_module(MODULE)
        yield
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop(MODULE, None)
        KINDS.pop("share", None)
        OBJECTIVES.pop("share", None)


def train_with(folder: Path, case: Case) -> list[str]:
    """Train with the file in `folder`. Return what is in the tables afterwards."""
    with added(folder):
        train_run(case)
    return [*KINDS, *OBJECTIVES]


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
    texts = [json.loads(line)["text"] for line in save_documents(tmp_path / "texts.jsonl", 21).read_text().splitlines()]
    shares = [
        {"text": text, "share": text.count("e") / len(text), "readers": 1 + number % 3}
        for number, text in enumerate(texts)
    ]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in shares))
    (command,) = read_blocks("text")
    given = (
        *command.split(), f"eval_file={tmp_path}/train.jsonl", "eval_on_start=true", "logging_steps=1", "max_steps=4",
        "optimizer=adamw", "learning_rate=3e-3", *overrides,
    )  # fmt: skip
    left = workers(2).run(train_with, tmp_path, objective_runs.build_case(tmp_path, tmp_path, "pp2", *given))
    assert left == [[*KINDS, *OBJECTIVES]] * 2 and "share" not in left[0]

    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["eval_loss"] < lines[0]["eval_loss"] and lines[-1]["eval_error"] < lines[0]["eval_error"]
    dataset = find_dataset(tmp_path)
    model, report = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "out" / "hf", dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values()), report
    batch = pad_documents([dataset.input_ids(i) for i in range(len(dataset))], model.config.pad_token_id)
    share, readers = (torch.tensor([[record[key]] for record in shares]) for key in ("share", "readers"))
    with torch.no_grad():
        logits = model.eval()(**batch, use_cache=False).logits
    surplus = readers * (logits.sigmoid() - share)
    entropy = F.binary_cross_entropy_with_logits(logits, share, weight=readers)
    error = surplus.abs().sum() / readers.sum()
    check_record(lines[-1], {"eval_loss": (entropy + surplus.mean() ** 2).item(), "eval_error": error.item()})


def test_the_file_is_added_and_removed(tmp_path: Path) -> None:
    (tmp_path / f"{MODULE}.py").write_text(read_blocks("python")[1])
    given = read_blocks("text")[0].split()
    with added(tmp_path):
        config = build_config(*given)
        check_objective(config)
        assert get_objective(config).name == "share"
    with pytest.raises(UserError, match=r"data\.name=share: must be one of chat, classification"):
        check_objective(build_config(*given))
