"""Rerankers through real pipeline stages against transformers' own class and the losses' formulas in one process:
steps, evaluations, checkpoints at other layouts, adapters, and what is exported."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import objective_runs
from support.cases import (
    BOUND,
    CHECKPOINTED,
    CLIPPED,
    CONTEXT_PARALLEL,
    LAYOUTS,
    ZERO_LAYOUTS,
    Case,
    merge,
    worst_difference,
)
from support.head_runs import load_oracle, load_with_adapter
from support.objective_runs import TENSOR_PARALLEL, check_continued, find_dataset, start_runs, train_answers
from support.retrieval_runs import (
    NUM_QUERIES,
    check_equal,
    check_record,
    compare_scores,
    evaluate_oracle,
    save_queries,
    train_oracle,
)
from support.tiny import save_llama, save_tokenizer
from support.workers import WorkerError, WorkerGroup
from transformers import AutoModelForSequenceClassification, AutoTokenizer

NEGATIVES, BINARY = "data.num_negatives=2", "rerank.loss_type=binary"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("rerank")
    for tied in (False, True):
        save_llama(root / f"tied{tied}", tied=tied)
        save_tokenizer(root / f"tied{tied}")
    save_queries(root / "train.jsonl", NUM_QUERIES)
    return root


def build_case(root: Path, workdir: Path, layout: str, *overrides: str, tied: bool = False, steps: int = 5) -> Case:
    given = ("data=rerank", NEGATIVES, "learning_rate=0.1", *overrides)
    return objective_runs.build_case(root, workdir, layout, *given, tied=tied, steps=steps)


@pytest.mark.parametrize(
    ("layout", "tied", "overrides"),
    [
        ("pp2", True, (CLIPPED, CHECKPOINTED)),
        *(
            pytest.param(layout, False, (BINARY, CHECKPOINTED), marks=pytest.mark.full)
            for layout in (*LAYOUTS, *TENSOR_PARALLEL, *CONTEXT_PARALLEL, *ZERO_LAYOUTS)
        ),
        *(
            pytest.param("pp2", True, (f"schedule={name}", *overrides), marks=pytest.mark.full)
            for name, *overrides in (("interleaved", "virtual_stages_per_rank=2"), ("zero_bubble",))
        ),
    ],
)
def test_five_sgd_steps_equal_transformers(
    workers: Callable[[int], WorkerGroup],
    root: Path,
    tmp_path: Path,
    layout: str,
    tied: bool,
    overrides: tuple[str, ...],
) -> None:
    case = build_case(root, tmp_path, layout, *overrides, tied=tied)
    model = load_oracle(case)
    result = merge(workers(case.world_size).run(train_answers, case))
    oracle = train_oracle(case, model, compare_scores)
    check_equal(result, oracle)
    worst, name = worst_difference(result["weights"], oracle["weights"])
    assert worst < BOUND, name
    assert max(result["losses"]) > 1.01 * min(result["losses"])  # it has moved


@pytest.fixture
def run(workers: Callable[[int], WorkerGroup], root: Path, tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    return start_runs(workers, root, tmp_path, build_case)


@pytest.mark.full
@pytest.mark.parametrize(("saved", "resumed"), [("pp2", "pp1"), ("pp2xdp2", "tp2"), ("zero3", "pp2")])
def test_a_run_learns_continues_at_another_layout_and_is_exported(
    run, root: Path, tmp_path: Path, saved: str, resumed: str
) -> None:
    # room for the longest query with a document: those that are cut away would have equal scores
    overrides = ("learning_rate=3e-3", "max_seq_length=512")
    whole = run("whole", saved, *overrides)
    run("begun", saved, "stop_after_steps=3", *overrides)
    ended = run("ended", resumed, f"resume={tmp_path}/begun/checkpoints", *overrides)
    check_continued(whole, ended, ("loss", "grad_norm", "recall_at_1", "mrr"), absolute=1e-5)
    assert whole[-1]["eval_loss"] < whole[0]["eval_loss"]
    folder = tmp_path / "ended" / "hf"
    model, report = AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values()), report
    assert model.config.num_labels == 1
    expected = evaluate_oracle(build_case(root, tmp_path, "pp1"), model, compare_scores, tmp_path)
    check_record(ended[-1], expected)
    run("again", "pp2", "evaluate_only=true", f"model_name_or_path={folder}", *overrides)
    check_record(json.loads((tmp_path / "again" / "evaluation.json").read_text()), expected)

    record = json.loads((root / "train.jsonl").read_text().splitlines()[5])
    tokens = AutoTokenizer.from_pretrained(folder)(record["query"], record["negatives"][1])["input_ids"]
    assert tokens == find_dataset(tmp_path).input_ids(3 * 5 + 2).tolist()


@pytest.mark.full
@pytest.mark.parametrize("layout", ["pp2", "tp2"])
def test_the_head_is_trained_and_saved_with_adapters(run, root: Path, tmp_path: Path, layout: str) -> None:
    lora = ("adapter=lora", "adapter.r=4", "learning_rate=3e-3")
    whole = run("whole", layout, *lora)
    run("begun", layout, *lora, "stop_after_steps=3")
    ended = run("ended", "pp1", *lora, f"resume={tmp_path}/begun/checkpoints")
    check_continued(whole, ended, ("loss", "grad_norm"), absolute=1e-5)
    model = load_with_adapter(root / "tiedFalse", tmp_path / "ended" / "hf", 1)
    check_record(ended[-1], evaluate_oracle(build_case(root, tmp_path, "pp1"), model, compare_scores, tmp_path))


def test_what_records_lack_is_named(run, tmp_path: Path, root: Path) -> None:
    for name, overrides, message in (
        (
            "few",
            ("data.num_negatives=4",),
            "field 'negatives' has 3 texts, and data.num_negatives=4; give a lower",
        ),
        (
            "none",
            ("data.query_field=question",),
            "no field 'question'; the record has 'query', 'positive', 'negatives'",
        ),
    ):
        with pytest.raises(WorkerError, match=message):
            run(name, "pp1", *overrides)
