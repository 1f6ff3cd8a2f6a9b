"""Keys that choose records: `data.eval_fraction`, `data.eval_samples`, `data.max_samples`, `data.filter`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.cases import Case, train_run
from support.configs import build_config
from support.runs import read_metrics
from support.tiny import save_llama, save_records, save_tokenizer
from support.workers import WorkerGroup
from transformers import AutoTokenizer

from data.storage.tokenized import TokenizedDataset, load_summary
from training.config.schema import RunConfig
from training.inputs.datasets import tokenize


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("held_out")
    save_llama(root / "model", num_hidden_layers=1)
    save_tokenizer(root / "model")
    save_records(root / "train.jsonl", 30)
    save_records(root / "other.jsonl", 20, seed=1)
    return root


def count_samples(root: Path, *overrides: str) -> dict[str, int]:
    """Return the samples of each key of a run's files."""
    config = build_config(
        f"train_file={root}/train.jsonl", f"data.cache_dir={root}/cache", "max_seq_length=256", *overrides
    )
    datasets = tokenize(config, AutoTokenizer.from_pretrained(root / "model"))
    return {key: load_summary(path).num_samples for key, path in datasets.items()}


def test_keys_choose_the_records_of_each_file(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_choice.py").write_text("def keep(record, least):\n    return len(record['prompt']) >= least\n")
    monkeypatch.chdir(tmp_path)
    assert count_samples(root, "data.eval_samples=7") == {"train_file": 23, "held_out": 7}
    shares = count_samples(root, "data.eval_fraction=0.3")
    assert sum(shares.values()) == 30 and 0 < shares["held_out"] < 20
    assert count_samples(root, "data.max_samples=5", f"eval_file={root}/other.jsonl") == {
        "train_file": 5,
        "eval_file": 20,
    }
    lengths = [len(json.loads(line)["prompt"]) for line in (root / "train.jsonl").read_text().splitlines()]
    chosen = count_samples(root, "data.filter={_target_: own_choice.keep, least: 30}", "data.eval_samples=2")
    assert chosen == {"train_file": sum(length >= 30 for length in lengths) - 2, "held_out": 2}


def test_a_mixture_holds_out_of_each_of_its_files_once(root: Path) -> None:
    """Weights count for training; what is held out is evaluated once."""
    mixture = f"[{{path: {root}/train.jsonl, weight: 3}}, {{path: {root}/other.jsonl, weight: 1}}]"
    config = build_config(
        f"train_file={mixture}", f"data.cache_dir={root}/cache", "max_seq_length=256", "data.eval_samples=20"
    )
    path = tokenize(config, AutoTokenizer.from_pretrained(root / "model"))["held_out"]
    data = TokenizedDataset(path, False, False)
    assert len(data) == 20 and set(data.sources.tolist()) == {0, 1}


@pytest.fixture
def train(workers: Callable[[int], WorkerGroup], root: Path, tmp_path: Path) -> Callable[..., list[dict]]:
    def call(*overrides: str, steps: int = 2) -> list[dict]:
        case = Case(root / "model", root / "train.jsonl", tmp_path, 1, 1, steps)
        keys = ("logging_steps=1", "lr_scheduler_type=constant", "data.eval_samples=6", *overrides)
        workers(1).run(train_run, replace(case, overrides=keys))
        return read_metrics(tmp_path / "out")

    return call


def test_a_run_evaluates_what_it_held_out_and_resumes_with_it(train: Callable[..., list[dict]], tmp_path: Path) -> None:
    lines = train()
    (before,) = (line for line in lines if "eval_loss" in line)
    assert before["step"] == 2 and before["eval_tokens"] > 0
    train("evaluate_only=true", "resume=latest")
    evaluation = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert evaluation["eval_file"] == "held out of train_file"
    assert evaluation["eval_loss"] == pytest.approx(before["eval_loss"]), "of the same records"
    lines = train("resume=latest", steps=3)
    after = [line for line in lines if "eval_loss" in line][-1]
    assert after["step"] == 3 and after["eval_tokens"] == before["eval_tokens"]
    with pytest.raises(AssertionError, match=r"data.eval_samples was 6, is 5"):
        train("resume=latest", "data.eval_samples=5", steps=4)


def test_keys_that_depend_on_evaluations_work_with_records_held_out(root: Path) -> None:
    from training.config.validate import check_config

    config: RunConfig = build_config(
        f"train_file={root}/train.jsonl", "data.eval_fraction=0.2", "load_best_model_at_end=true", "eval_steps=2",
        "early_stopping_patience=1",
    )  # fmt: skip
    check_config(config, has_accelerator=False)
