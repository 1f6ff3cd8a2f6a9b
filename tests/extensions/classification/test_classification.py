"""Classifiers through real pipeline stages against transformers' own class and loss in one process: steps, packed rows,
evaluations, checkpoints at other layouts, adapters, and what is exported."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import objective_runs
from support.adapters import make_adapter
from support.cases import CHECKPOINTED, CLIPPED, CONTEXT_PARALLEL, LAYOUTS, ZERO_LAYOUTS, Case, merge
from support.head_runs import (
    NAMES,
    check_adapter_steps,
    load_oracle,
    load_with_adapter,
    pad_documents,
    save_documents,
    train_documents,
)
from support.objective_runs import (
    PACKED_LAYOUTS,
    TENSOR_PARALLEL,
    check_record,
    check_resumed,
    check_steps,
    convert,
    find_dataset,
    replace_model,
    start_runs,
    train_answers,
)
from support.tiny import save_llama, save_tokenizer
from support.workers import WorkerError, WorkerGroup
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from batch import Targets
from data.options import ProblemType
from data.storage.tokenized import TokenizedDataset
from errors import UserError
from extensions.classification import documents
from extensions.classification.documents import ClassificationLoss, ClassScores, compute_auc, compute_f1
from extensions.classification.keys import ClassificationConfig
from models.storage.tensor_files import open_safetensors

NUM_DOCUMENTS = 42  # no multiple of a batch
WEIGHTED = "classification.class_weights=[0.5,2.0,1.0]"
PACKED = ("data.packing=true", "micro_batch_size=1", "global_batch_size=4")
MULTI = ("data.problem_type=multi_label_classification", "data.label_field=labels")
REGRESSION = ("data.problem_type=regression", "data.label_field=number")
NUMBERS = ("data.problem_type=regression", "data.label_field=numbers", "data.labels=[spaces,kind]")
SMALL_STEPS = "learning_rate=0.01"  # a squared error diverges with those of classes, and rounding grows with it


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("classification")
    for tied in (False, True):
        save_llama(root / f"tied{tied}", tied=tied)
        save_tokenizer(root / f"tied{tied}")
    save_documents(root / "train.jsonl", NUM_DOCUMENTS)
    return root


def build_case(
    root: Path, workdir: Path, layout: str, *overrides: str, tied: bool = False, steps: int = 5, file: str = "train"
) -> Case:
    given = ("data=classification", "learning_rate=0.1", *overrides)
    return objective_runs.build_case(root, workdir, layout, *given, tied=tied, steps=steps, file=file)


def compute_loss(case: Case, model: torch.nn.Module, dataset: TokenizedDataset, ids: list[int]) -> tuple[Any, Any]:
    """Return the loss of some documents in one padded batch, by the model's own class, and their scores."""
    config, labels = case.config(), dataset.sample_labels
    assert labels is not None
    chosen = torch.from_numpy(labels[ids].copy())
    kind = config.data.problem_type
    chosen = chosen[:, 0].long() if kind is ProblemType.single_label_classification else chosen.float()
    pad = AutoTokenizer.from_pretrained(config.model_name_or_path).pad_token_id
    batch = pad_documents([dataset.input_ids(i) for i in ids], pad)
    found = model(**batch, labels=chosen, use_cache=False)
    if config.read_group(ClassificationConfig).class_weights is None:
        return found.loss, found.logits
    weights = torch.tensor(config.read_group(ClassificationConfig).class_weights)
    if kind is ProblemType.single_label_classification:
        losses = -found.logits.log_softmax(dim=1)[torch.arange(len(ids)), chosen] * weights[chosen]
        return losses.mean(), found.logits
    likelihood = torch.where(chosen > 0, found.logits.sigmoid(), 1 - found.logits.sigmoid())
    return (-likelihood.log() * weights).mean(), found.logits


def compute_accuracy(kind: ProblemType, scores: torch.Tensor, labels: np.ndarray) -> dict[str, float]:
    """Return the share of documents that are right; nothing of numbers."""
    if kind is ProblemType.regression:
        return {}
    if kind is ProblemType.multi_label_classification:
        return {"accuracy": float(((scores.numpy() > 0) == labels).all(axis=1).mean())}
    return {"accuracy": float((scores.argmax(dim=1).numpy() == labels[:, 0]).mean())}


def train_oracle(case: Case, model: torch.nn.Module) -> dict[str, Any]:
    """The same steps of SGD, and how many documents each had."""
    kind, counts = case.config().data.problem_type, []

    def compute_step(dataset: TokenizedDataset, ids: list[int]) -> tuple[torch.Tensor, dict[str, float]]:
        loss, scores = compute_loss(case, model, dataset, ids)
        counts.append(len(ids))
        return loss, compute_accuracy(kind, scores.detach(), dataset.sample_labels[ids])

    return train_documents(case, model, compute_step) | {"documents": counts}


def check_case(case: Case, workers: Callable[[int], WorkerGroup]) -> dict[str, Any]:
    """Check five steps against the oracle, which is returned."""
    model = load_oracle(case)
    result = merge(workers(case.world_size).run(train_answers, case))
    oracle = train_oracle(case, model)
    check_steps(result, oracle)
    return oracle


@pytest.mark.parametrize(
    ("layout", "tied", "overrides"),
    [
        ("pp2", True, (WEIGHTED, CLIPPED, CHECKPOINTED)),
        *(
            pytest.param(layout, False, (CLIPPED, CHECKPOINTED), marks=pytest.mark.full)
            for layout in (*LAYOUTS, *TENSOR_PARALLEL, *CONTEXT_PARALLEL, *ZERO_LAYOUTS)
        ),
        *(
            pytest.param("pp2", True, (f"schedule={name}", *overrides), marks=pytest.mark.full)
            for name, *overrides in (("interleaved", "virtual_stages_per_rank=2"), ("zero_bubble",))
        ),
        *(
            pytest.param("pp2xdp2", False, overrides, marks=pytest.mark.full)
            for overrides in (
                MULTI,
                (*MULTI, "classification.class_weights=[2.0,0.5]"),
                (*REGRESSION, SMALL_STEPS),
                (*NUMBERS, SMALL_STEPS),
            )
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
    check_case(build_case(root, tmp_path, layout, *overrides, tied=tied), workers)


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "overrides"),
    [*((layout, ()) for layout in ("pp1", "pp2xdp2", "cp2")), ("pp2", (CHECKPOINTED,)), *PACKED_LAYOUTS],
)
def test_packed_documents_are_scored_alone(
    workers: Callable[[int], WorkerGroup], root: Path, tmp_path: Path, layout: str, overrides: tuple[str, ...]
) -> None:
    oracle = check_case(build_case(root, tmp_path, layout, *PACKED, SMALL_STEPS, *overrides), workers)
    assert len(set(oracle["documents"])) > 1 and max(oracle["documents"]) > 4  # rows hold several


@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen3_next", "jamba"])
def test_no_state_passes_from_a_document_to_the_next(
    workers: Callable[[int], WorkerGroup], root: Path, tmp_path: Path, family: str
) -> None:
    """Linear attention, and state spaces between layers of attention, both with experts. The oracle pads."""
    case = build_case(root, tmp_path, "pp2", *PACKED, "learning_rate=0.003")  # larger steps amplify rounding
    check_case(replace_model(case, tmp_path / "model", family), workers)


@pytest.fixture
def run(workers: Callable[[int], WorkerGroup], root: Path, tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    return start_runs(workers, root, tmp_path, build_case)


def count_auc(scores: np.ndarray, actual: np.ndarray) -> float:
    """The share of pairs that are in order, counted one by one."""
    pairs = [(a, b) for a in scores[actual] for b in scores[~actual]]
    return float(np.mean([1.0 if a > b else 0.5 if a == b else 0.0 for a, b in pairs]))


def count_f1(predicted: np.ndarray, actual: np.ndarray) -> float:
    found, said, there = (predicted & actual).sum(), predicted.sum(), actual.sum()
    if not found:
        return 0.0
    precision, recall = found / said, found / there
    return float(2 * precision * recall / (precision + recall))


def evaluate(model: torch.nn.Module, dataset: TokenizedDataset, pad: int, problem_type: str) -> dict[str, float]:
    """Evaluate as users would, in one padded batch."""
    labels = dataset.sample_labels
    assert labels is not None
    batch = pad_documents([dataset.input_ids(i) for i in range(len(dataset))], pad)
    with torch.no_grad():
        scores = model.eval()(**batch, use_cache=False).logits
    if problem_type == "regression":
        errors = scores - torch.from_numpy(labels.copy())
        return {"eval_loss": errors.square().mean().item(), "eval_mae": errors.abs().mean().item()}
    if problem_type == "multi_label_classification":
        actual, predicted, sure = labels > 0, (scores > 0).numpy(), scores.numpy()
        loss = F.binary_cross_entropy_with_logits(scores, torch.from_numpy(labels.copy()).float())
    else:
        columns = np.arange(scores.shape[1])
        actual, predicted = labels == columns, scores.argmax(dim=1, keepdim=True).numpy() == columns
        sure = scores.softmax(dim=1).numpy()
        loss = F.cross_entropy(scores, torch.from_numpy(labels[:, 0].astype("int64")))
    counted = np.flatnonzero((actual | predicted).any(axis=0) | (problem_type == "multi_label_classification"))
    return {
        "eval_loss": loss.item(),
        "eval_accuracy": float((actual == predicted).all(axis=1).mean()),
        "eval_f1": float(np.mean([count_f1(predicted[:, c], actual[:, c]) for c in counted])),
        "eval_auc": float(np.mean([count_auc(sure[:, c], actual[:, c]) for c in range(actual.shape[1])])),
    }


@pytest.mark.full
@pytest.mark.parametrize(
    ("saved", "resumed", "overrides"),
    [
        ("pp2", "pp1", ()),
        ("pp2xdp2", "tp2", MULTI),
        ("zero3", "pp2", REGRESSION),
        ("tp2xpp2", "cp2", PACKED),
        ("pp2", "pp2", (*PACKED, "learning_rate=2e-3")),  # at 3e-3 two documents have one score but for rounding
    ],
)
def test_a_run_learns_continues_at_another_layout_and_is_exported(
    run, root: Path, tmp_path: Path, saved: str, resumed: str, overrides: tuple[str, ...]
) -> None:
    overrides = ("learning_rate=3e-3", *overrides)
    whole, ended = check_resumed(run, tmp_path, (saved, resumed), *overrides)
    assert whole[-1]["eval_loss"] < whole[0]["eval_loss"]

    folder = tmp_path / "ended" / "hf"
    model, report = AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values()), report
    expected = evaluate(model, find_dataset(tmp_path), model.config.pad_token_id, model.config.problem_type)
    check_record(ended[-1], expected)
    run("again", "pp2", "evaluate_only=true", f"model_name_or_path={folder}", *overrides)
    check_record(json.loads((tmp_path / "again" / "evaluation.json").read_text()), expected)


@pytest.mark.full
def test_an_export_is_read_back_bit_for_bit_and_its_tokenizer_gives_the_tokens(run, root: Path, tmp_path: Path) -> None:
    run("first", "pp2", "max_steps=1")
    hf, converted, back = tmp_path / "first" / "hf", tmp_path / "converted", tmp_path / "back"
    convert(hf, converted)
    convert(converted, back, "--to_hf")
    tensors = [open_safetensors(next(folder.glob("*.safetensors"))) for folder in (hf, back)]
    assert set(tensors[0].keys()) == set(tensors[1].keys()) and "score.weight" in tensors[0].keys()
    assert all(torch.equal(tensors[0].get_tensor(name), tensors[1].get_tensor(name)) for name in tensors[0].keys())
    assert AutoConfig.from_pretrained(back).id2label == dict(enumerate(NAMES))

    record = json.loads((root / "train.jsonl").read_text().splitlines()[5])
    tokens = AutoTokenizer.from_pretrained(hf)(record["text"])["input_ids"]
    assert tokens == find_dataset(tmp_path).input_ids(5).tolist()


@pytest.mark.full
@pytest.mark.parametrize("layout", ["pp2", "tp2", "pp2xdp2"])
def test_a_head_is_trained_and_saved_with_adapters(run, root: Path, tmp_path: Path, layout: str) -> None:
    _, ended = check_resumed(run, tmp_path, (layout, "pp1"), "adapter=lora", "adapter.r=4", "learning_rate=3e-3")
    hf, merged = tmp_path / "ended" / "hf", tmp_path / "merged"
    dataset = find_dataset(tmp_path)
    expected = evaluate(
        load_with_adapter(root / "tiedFalse", hf, len(NAMES)), dataset, 0, "single_label_classification"
    )
    check_record(ended[-1], expected)
    convert(hf, merged, "--to_hf")
    model = AutoModelForSequenceClassification.from_pretrained(merged, dtype=torch.float32)
    assert model.config.id2label == dict(enumerate(NAMES))
    check_record(ended[-1], evaluate(model, dataset, 0, "single_label_classification"))
    own = f"resume={tmp_path}/ended/checkpoints"
    for given in ((own,), (own, "adapter=lora", "adapter.r=4"), ("adapter=lora", f"adapter.name_or_path={hf}")):
        run("evaluated", "pp2", "evaluate_only=true", *given)
        check_record(json.loads((tmp_path / "evaluated" / "evaluation.json").read_text()), expected)


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "overrides"),
    [("pp1", ()), ("pp2", ()), ("zero2", ()), ("pp2", PACKED)],
)
def test_five_sgd_steps_with_adapters_equal_peft(
    workers: Callable[[int], WorkerGroup], run, root: Path, tmp_path: Path, layout: str, overrides: tuple[str, ...]
) -> None:
    """From an exported adapter, so that its matrices and its head have gradients in the first step."""
    run("first", "pp1", "adapter=lora", "adapter.r=4", "learning_rate=1e-2", "max_steps=2")
    adapter = tmp_path / "first" / "hf"
    # larger steps amplify rounding
    lora = ("adapter=lora", f"adapter.name_or_path={adapter}", "learning_rate=0.003")
    case = build_case(root, tmp_path, layout, *lora, CHECKPOINTED, *overrides)
    model = load_with_adapter(root / "tiedFalse", adapter, len(NAMES))
    model.config.problem_type = "single_label_classification"
    check_adapter_steps(merge(workers(case.world_size).run(train_answers, case)), train_oracle(case, model))


def test_what_a_classifier_cannot_be_is_refused(run, root: Path, tmp_path: Path) -> None:
    make_adapter(tmp_path / "lora", root / "tiedFalse", ["q_proj"])
    for overrides, message in (
        (("classification.class_weights=[1,2]",), "give one weight of 0 or more for each of the 3 labels"),
        ((*REGRESSION, "classification.class_weights=[1]"), "numbers have no classes"),
        (
            ("data.labels=[calendar,json]",),
            "field 'label' is 'textwrap', which is not among the labels .calendar, json",
        ),
        (("data.labels=[calendar]",), "data.labels=.calendar.: name each label once, and at least 2"),
        (("data.label_field=number",), "field 'number' must be a label, a text or a whole number"),
        (("evaluate_only=true",), "is not a sequence classifier, its head would be a new one"),
        (
            ("adapter=lora", f"adapter.name_or_path={tmp_path}/lora"),
            "the adapter has no head, and that of a new sequence",
        ),
    ):
        with pytest.raises(WorkerError, match=message):
            run("refused", "pp1", *overrides)


SCORES = torch.tensor([[2.0, -1.0, 0.5], [0.1, 0.2, 0.3], [-1.0, 3.0, 0.0], [0.0, 0.0, 1.0]])
TARGETS = Targets.find(torch.arange(4)[:, None], torch.tensor(8.0))


def score(loss: ClassificationLoss, labels: torch.Tensor) -> torch.Tensor:
    return loss((SCORES[:, None], torch.eye(3)), replace(TARGETS, columns={"labels": labels.double()}))


def test_the_losses_equal_their_formulas() -> None:
    weights = [0.5, 2.0, 1.0]
    classes = torch.tensor([0, 2, 1, 1])
    loss = ClassificationLoss(ProblemType.single_label_classification, 3, weights)
    expected = F.cross_entropy(SCORES, classes, torch.tensor(weights), reduction="sum") / 8
    torch.testing.assert_close(score(loss, classes[:, None]), expected)
    several = torch.tensor([[1, 0, 1], [0, 0, 0], [1, 1, 1], [0, 1, 0]])
    loss = ClassificationLoss(ProblemType.multi_label_classification, 3, weights)
    expected = F.binary_cross_entropy_with_logits(SCORES, several.float(), torch.tensor(weights)) * 4 / 8
    torch.testing.assert_close(score(loss, several), expected)
    loss = ClassificationLoss(ProblemType.regression, 3)
    torch.testing.assert_close(score(loss, several), F.mse_loss(SCORES, several.float()) * 4 / 8)
    assert loss.sums[0].take().flatten().tolist() == pytest.approx([(SCORES - several).abs().sum().item(), 12])


def test_areas_and_f1_equal_those_counted_one_by_one() -> None:
    generator = np.random.default_rng(0)
    scores, actual = generator.integers(0, 6, 40) / 3, generator.random(40) < 0.3
    found = compute_auc(torch.from_numpy(scores), torch.from_numpy(actual))
    assert found == pytest.approx(count_auc(scores, actual))
    assert compute_auc(torch.ones(3), torch.ones(3, dtype=torch.bool)) is None
    said = scores > 1
    counts = torch.tensor([[(said & actual).sum(), 0], [said.sum(), 0], [actual.sum(), 0]], dtype=torch.float64)
    assert compute_f1(counts, False) == pytest.approx(count_f1(said, actual))
    assert compute_f1(counts, True) == pytest.approx(count_f1(said, actual) / 2)  # the second label is nowhere
    assert compute_f1(torch.zeros(3, 2), False) == 0.0  # no label occurs, none is predicted: not NaN


@pytest.mark.parametrize(
    ("kind", "labels", "expected"),
    [
        # One label is right twice, one is missed once, and one is nowhere
        (ProblemType.multi_label_classification, [[1, 1, 0], [1, 0, 0]], 1 / 3),
        (ProblemType.single_label_classification, [[0], [1]], 1 / 3),  # (2/3 + 0) / 2
    ],
)
def test_a_label_that_is_nowhere_counts_in_f1_where_documents_have_several(
    kind: ProblemType, labels: list[list[int]], expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents.dist, "all_reduce", lambda counts: None)
    monkeypatch.setattr(documents, "gather_columns", lambda mine: mine)
    kept = ClassScores(kind, 3)
    with torch.no_grad():
        kept.add(torch.tensor([[2.0, -1.0, -1.0]] * 2), torch.tensor(labels).double())
    assert kept.finish_evaluation(torch.device("cpu"))["f1"] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("kind", "num_given", "num_outputs"),
    [(ProblemType.regression, 3, 1), (ProblemType.regression, 1, 3), (ProblemType.single_label_classification, 2, 3)],
)
def test_another_number_of_labels_is_not_broadcast(kind: ProblemType, num_given: int, num_outputs: int) -> None:
    outputs = torch.zeros(1, 2, 4), torch.ones(num_outputs, 4)
    targets = torch.tensor([[-100, 0]])
    targets = Targets.find(targets, torch.tensor(1.0), columns={"labels": torch.zeros(1, num_given)})
    with pytest.raises(UserError, match=f"a record has {num_given} label.*data.problem_type={kind.value} takes"):
        ClassificationLoss(kind, num_outputs)(outputs, targets)


def test_a_score_that_is_not_a_number_is_no_right_answer() -> None:
    kept = ClassScores(ProblemType.single_label_classification, 2)
    kept.add(torch.full((2, 2), torch.nan), torch.zeros(2, 1))
    taken = kept.sums.take()
    assert taken is not None and taken[0].isnan().all()


def test_areas_of_many_labels_read_each_micro_batch_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Labels times micro-batches would be hours for thousands of both."""
    passes = 0

    class Counted(list):
        def __iter__(self) -> Any:
            nonlocal passes
            passes += 1
            return super().__iter__()

    kept = ClassScores(ProblemType.single_label_classification, 20)
    generator = torch.Generator().manual_seed(0)
    scored = [
        (torch.randn(3, 20, generator=generator), torch.randint(20, (3, 1), generator=generator)) for _ in range(30)
    ]
    with torch.no_grad():
        for scores, labels in scored:
            kept.add(scores, labels)
    monkeypatch.setattr(documents.dist, "all_reduce", lambda counts: None)
    monkeypatch.setattr(documents, "gather_columns", lambda mine: mine)
    monkeypatch.setattr(kept, "_kept", Counted(kept._kept))
    found = kept.finish_evaluation(torch.device("cpu"))["auc"]
    assert passes <= 3
    confidence, labels = (torch.cat(each) for each in zip(*scored))
    probabilities = confidence.double().softmax(dim=1).numpy()
    areas = [count_auc(probabilities[:, label], (labels[:, 0] == label).numpy()) for label in labels.unique().tolist()]
    assert found == pytest.approx(np.mean(areas))
