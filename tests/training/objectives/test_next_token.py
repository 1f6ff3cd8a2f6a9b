"""Smoothed labels and token accuracy through real pipeline stages, against the plain Hugging Face model in one
process."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cases import BOUND, LAYOUTS, Case, mean_loss, merge, train_case, train_oracle, worst_difference
from support.configs import build_config
from support.runs import eval_dataset, read_metrics
from support.workers import WorkerGroup
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from data.storage.tokenized import TokenizedDataset
from errors import UserError
from training.objectives.registry import check_objective, describe_objective

SMOOTHED = "label_smoothing=0.2"
ALL_LAYOUTS = LAYOUTS | {"tp2": (1, 2), "tp2xpp2": (2, 4)}


def smoothed_loss(logits: torch.Tensor, labels: torch.Tensor, **_: Any) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=0.2)


@pytest.mark.parametrize(
    "layout",
    ["pp2", *(pytest.param(each, marks=pytest.mark.full) for each in ("pp1", "pp2xdp2", "tp2", "tp2xpp2"))],
)
def test_three_sgd_steps_with_smoothed_labels(
    workers: Callable[[int], WorkerGroup], root: Path, tmp_path: Path, layout: str
) -> None:
    num_stages, world_size = ALL_LAYOUTS[layout]
    keys = (SMOOTHED, *(("tensor_parallel_size=2",) if layout.startswith("tp2") else ()))
    case = Case(root / "tiedFalse", root / "train.jsonl", tmp_path, num_stages, world_size, 3, keys)
    result = merge(workers(world_size).run(train_case, case))
    model = AutoModelForCausalLM.from_pretrained(case.model, dtype=torch.float32)
    plain = train_oracle(replace(case, steps=1), model)["losses"]
    model = AutoModelForCausalLM.from_pretrained(case.model, dtype=torch.float32)
    model.loss_function = smoothed_loss
    oracle = train_oracle(case, model)
    assert worst_difference(result["weights"], oracle["weights"])[0] < BOUND
    torch.testing.assert_close(result["losses"], oracle["losses"], rtol=BOUND, atol=0)
    torch.testing.assert_close(result["norms"], oracle["norms"], rtol=BOUND, atol=0)
    assert abs(result["losses"][0] - plain[0]) > 1e-3


@torch.no_grad()
def count_correct(model: torch.nn.Module, dataset: TokenizedDataset) -> tuple[int, int]:
    correct = targets = 0
    for i in range(len(dataset)):
        labels = torch.from_numpy(dataset.labels(i).astype("int64"))[1:]
        logits = model.eval()(torch.from_numpy(dataset.input_ids(i).astype("int64"))[None]).logits[0, :-1]
        correct += int((logits.argmax(-1) == labels).sum())
        targets += int((labels != -100).sum())
    return correct, targets


@pytest.mark.parametrize(
    ("num_stages", "world_size", "overrides"),
    [
        (2, 2, (SMOOTHED,)),
        pytest.param(1, 1, ("data.packing=true",), marks=pytest.mark.full),
        pytest.param(2, 4, (SMOOTHED,), marks=pytest.mark.full),
        pytest.param(1, 2, ("tensor_parallel_size=2", SMOOTHED), marks=pytest.mark.full),
        pytest.param(1, 2, ("context_parallel_size=2", SMOOTHED), marks=pytest.mark.full),
    ],
)
def test_evaluations_report_the_plain_loss_and_the_token_accuracy(
    run, root: Path, num_stages: int, world_size: int, overrides: tuple[str, ...]
) -> None:
    """After four steps, in which the model learns to guess some tokens; and again from the export alone."""
    out = run("run", num_stages, world_size, *overrides)
    reported, model = read_metrics(out)[-1], AutoModelForCausalLM.from_pretrained(out / "hf")
    correct, num_targets = count_correct(model, eval_dataset(root))
    assert correct > 0 and reported["eval_token_accuracy"] == correct / num_targets
    assert reported["eval_loss"] == pytest.approx(mean_loss(model, eval_dataset(root))[0], rel=1e-5)

    again = run("again", 1, 1, "evaluate_only=true", f"model_name_or_path={out}/hf")
    assert json.loads((again / "evaluation.json").read_text())["eval_token_accuracy"] == correct / num_targets


@pytest.mark.full
def test_token_accuracy_can_be_turned_off(run) -> None:
    assert "eval_token_accuracy" not in read_metrics(run("run", 1, 1, "eval_token_accuracy=false"))[-1]


def test_smoothing_must_be_kept_and_is_for_next_token_objectives_only() -> None:
    assert "label_smoothing" not in describe_objective(build_config())
    assert describe_objective(build_config(SMOOTHED))["label_smoothing"] == "0.2"
    check_objective(build_config(SMOOTHED, "data=pretrain"))
    with pytest.raises(UserError, match="label_smoothing=0.2: task=dpo does not read it, only pretrain, sft do"):
        check_objective(build_config(SMOOTHED, "data=preference"))
