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
from support.cases import CHECKPOINTED, CLIPPED, CONTEXT_PARALLEL, LAYOUTS, ZERO_LAYOUTS, Case, merge
from support.head_runs import check_adapter_steps, load_oracle, load_with_adapter, save_queries
from support.objective_runs import (
    PACKED_LAYOUTS,
    TENSOR_PARALLEL,
    check_record,
    check_resumed,
    check_steps,
    find_dataset,
    replace_model,
    start_runs,
    train_answers,
)
from support.retrieval_runs import NUM_QUERIES, compare_scores, evaluate_oracle, train_oracle
from support.tiny import save_llama, save_tokenizer
from support.workers import WorkerError, WorkerGroup
from transformers import AutoModelForSequenceClassification, AutoTokenizer

# Room for the longest query with all of its documents: those that are cut away would have equal scores
PACKED = ("data.packing=true", "max_seq_length=1024", "micro_batch_size=1", "global_batch_size=4")
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
            pytest.param(layout, False, (*PACKED, *overrides), marks=pytest.mark.full)
            for layout in ("pp1", "pp2", "pp2xdp2", "cp2")
            for overrides in ((BINARY, CHECKPOINTED), (CLIPPED,))
        ),
        *(
            pytest.param(layout, False, (*PACKED, CLIPPED, *overrides), marks=pytest.mark.full)
            for layout, overrides in PACKED_LAYOUTS
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
    check_steps(result, train_oracle(case, model, compare_scores))


@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen3_next", "jamba"])
def test_no_state_passes_from_a_document_to_the_next(
    workers: Callable[[int], WorkerGroup], root: Path, tmp_path: Path, family: str
) -> None:
    """Linear attention, and state spaces between layers of attention, both with experts."""
    case = replace_model(build_case(root, tmp_path, "pp2", *PACKED, CLIPPED), tmp_path / "model", family)
    model = load_oracle(case)
    result = merge(workers(case.world_size).run(train_answers, case))
    check_steps(result, train_oracle(case, model, compare_scores))


@pytest.fixture
def run(workers: Callable[[int], WorkerGroup], root: Path, tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    return start_runs(workers, root, tmp_path, build_case)


@pytest.mark.full
@pytest.mark.parametrize(
    ("saved", "resumed", "overrides"),
    [
        ("pp2", "pp1", ()),
        ("pp2xdp2", "tp2", ()),
        ("zero3", "pp2", ()),
        ("pp2xdp2", "pp2", PACKED),
        ("pp2", "pp2", PACKED),
    ],
)
def test_a_run_learns_continues_at_another_layout_and_is_exported(
    run, root: Path, tmp_path: Path, saved: str, resumed: str, overrides: tuple[str, ...]
) -> None:
    # room for the longest query with a document: those that are cut away would have equal scores
    overrides = ("learning_rate=3e-3", "max_seq_length=512", *overrides)
    whole, ended = check_resumed(run, tmp_path, (saved, resumed), *overrides, metrics=("recall_at_1", "mrr"))
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
    _, ended = check_resumed(run, tmp_path, (layout, "pp1"), "adapter=lora", "adapter.r=4", "learning_rate=3e-3")
    model = load_with_adapter(root / "tiedFalse", tmp_path / "ended" / "hf", 1)
    check_record(ended[-1], evaluate_oracle(build_case(root, tmp_path, "pp1"), model, compare_scores, tmp_path))


@pytest.mark.full
def test_sentence_transformers_loads_an_export(run, root: Path, tmp_path: Path) -> None:
    """Its scores, before the sigmoid that it puts on them, within 1e-6: of pairs as long as the model has positions, to
    which it cuts longer ones."""
    library = pytest.importorskip("sentence_transformers")
    run("first", "pp2", "max_steps=2")
    folder = tmp_path / "first" / "hf"
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    records = [json.loads(line) for line in (root / "train.jsonl").read_text().splitlines()[:5]]
    pairs = [(record["query"], text) for record in records for text in (record["positive"], *record["negatives"])]
    loaded = library.CrossEncoder(str(folder), device="cpu")
    pairs = [pair for pair in pairs if len(tokenizer(*pair)["input_ids"]) <= loaded.max_seq_length]
    assert len(pairs) > 10
    found = loaded.predict(pairs, activation_fn=torch.nn.Identity(), convert_to_tensor=True)
    with torch.no_grad():
        expected = [model.eval()(**tokenizer(*pair, return_tensors="pt")).logits[0, 0] for pair in pairs]
    torch.testing.assert_close(found, torch.stack(expected), rtol=0, atol=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("overrides", [(), PACKED], ids=["unpacked", "packed"])
def test_five_sgd_steps_with_adapters_equal_peft(
    workers: Callable[[int], WorkerGroup], run, root: Path, tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    """From an exported adapter, so that its matrices and its head have gradients in the first step."""
    run("first", "pp1", "adapter=lora", "adapter.r=4", "learning_rate=1e-2", "max_steps=2", *overrides)
    adapter = tmp_path / "first" / "hf"
    # larger steps amplify rounding
    lora = ("adapter=lora", f"adapter.name_or_path={adapter}", "learning_rate=0.003")
    case = build_case(root, tmp_path, "pp2", *lora, CHECKPOINTED, *overrides)
    model = load_with_adapter(root / "tiedFalse", adapter, 1)
    result = merge(workers(case.world_size).run(train_answers, case))
    check_adapter_steps(result, train_oracle(case, model, compare_scores))


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
