"""Distillation in tests: a teacher and its students, a run at each layout, and the same steps of SGD with both plain
models in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import objective_runs
from support.cases import BOUND, Case
from support.distilling import compute_divergence, join_others
from support.objective_runs import NUM_SAMPLES, find_dataset
from support.tiny import VOCAB_SIZE, find_tokenized, save_llama, save_records, save_tokenizer
from torch.nn import functional as F

from data.order import GlobalOrder
from data.storage.rows import RowPlan, Rows
from training.config.schema import RunConfig
from training.inputs.datasets import build_row_plan

TOP_K = 12


def save_teacher(root: Path) -> Path:
    """Saves `tiedFalse` and `tiedTrue`, students, `teacher`, and records in train.jsonl and other.jsonl."""
    for tied in (False, True):
        save_llama(root / f"tied{tied}", tied=tied)
        save_tokenizer(root / f"tied{tied}")
    save_sharp(root / "teacher", seed=7)
    save_records(root / "train.jsonl", NUM_SAMPLES)
    save_records(root / "other.jsonl", 5, seed=3)
    return root


def save_sharp(folder: Path, seed: int, **fields: Any) -> None:
    """A teacher of another size, which is sure of some tokens: random weights alone know nothing."""
    model = save_llama(folder, seed=seed, hidden_size=64, num_hidden_layers=7, num_key_value_heads=4, **fields)
    model.lm_head.weight.data *= 12
    model.save_pretrained(folder)
    save_tokenizer(folder)


def build_case(root: Path, workdir: Path, layout: str, *overrides: str, tied: bool = False, steps: int = 3) -> Case:
    given = (
        f"distill.teacher={root}/teacher", "distill.coef=0.8", f"distill.top_k={TOP_K}", "learning_rate=0.2",
        *overrides,
    )  # fmt: skip
    return objective_runs.build_case(root, workdir, layout, *given, tied=tied, steps=steps)


def compute_document(
    config: RunConfig, student: torch.nn.Module, teacher: torch.nn.Module, ids: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """The sums of cross entropy and of the distillation loss over the targets of a document, and their number."""
    keys, is_target = config.distill, labels[1:] != -100
    logits = student(ids[None]).logits[0, :-1][is_target]
    with torch.no_grad():
        teacher_logits = teacher(ids[None]).logits[0, :-1][is_target]
    p, q = ((each.double() / keys.temperature).softmax(-1) for each in (logits, teacher_logits))
    joined = join_others(p, q, keys.top_k or VOCAB_SIZE)
    distilled = keys.temperature**2 * compute_divergence(*joined, keys.divergence.value).sum()
    return F.cross_entropy(logits, labels[1:][is_target], reduction="sum"), distilled, int(is_target.sum())


def list_documents(folder: Path, plan: RowPlan, rows: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Tokens and labels of the documents of some rows, each alone."""
    opened, dataset = Rows(folder, plan, True, True), find_dataset(folder.parent.parent, None)
    found = []
    for row in rows:
        for sample, start, stop in opened.pieces(int(row)):
            columns = (dataset.input_ids(sample), dataset.labels(sample))
            found.append(tuple(torch.from_numpy(column[start:stop].astype("int64")) for column in columns))
    return found


def train_oracle(case: Case, student: torch.nn.Module, teacher: torch.nn.Module) -> dict[str, Any]:
    """The same steps of SGD, document by document."""
    config = case.config()
    folder = find_tokenized(case.workdir)[0]
    plan = build_row_plan(config, "train_file")
    order = GlobalOrder(len(Rows(folder, plan, False, False)), config.global_batch_size, config.seed)
    trained = [parameter for parameter in student.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=config.learning_rate)
    result: dict[str, Any] = {"losses": [], "norms": [], "metrics": []}
    for step in range(case.steps):
        optimizer.zero_grad()
        documents = list_documents(folder, plan, order.sample_ids(step))
        number = sum(int((labels[1:] != -100).sum()) for _, labels in documents)
        sums = torch.zeros(2, dtype=torch.float64)
        for ids, labels in documents:
            entropy, distilled, _ = compute_document(config, student, teacher, ids, labels)
            (((1 - config.distill.coef) * entropy + config.distill.coef * distilled) / number).backward()
            sums += torch.stack([entropy.detach().double(), distilled.detach()]) / number
        result["losses"].append(sums[0].item())
        result["metrics"].append({"distill_loss": sums[1].item()})
        result["norms"].append(float(torch.nn.utils.clip_grad_norm_(trained, config.max_grad_norm or float("inf"))))
        optimizer.step()
    return result | {"weights": {name: tensor.detach().clone() for name, tensor in student.named_parameters()}}


def check_equal(result: dict[str, Any], oracle: dict[str, Any]) -> None:
    for name in ("losses", "norms"):
        torch.testing.assert_close(result[name], oracle[name], rtol=BOUND, atol=0)
    for found, expected in zip(result["metrics"], oracle["metrics"], strict=True):
        assert found == pytest.approx(expected, rel=BOUND)
    assert oracle["metrics"][0]["distill_loss"] > 0.05  # far from the teacher
    assert len({round(loss, 3) for loss in result["losses"]}) > 1  # it has moved
