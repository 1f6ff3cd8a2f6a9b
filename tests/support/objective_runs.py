"""Objectives that learn from answers, in tests: a case at each layout, what a rank reports, whole runs, and the same
steps of SGD on a plain model in one process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cases import (
    BOUND,
    CONTEXT_PARALLEL,
    DATA_PARALLEL,
    LAYOUTS,
    ROOT,
    ZERO_LAYOUTS,
    Case,
    build_all,
    hf_weights,
    train_run,
    worst_difference,
)
from support.families import save_family
from support.tiny import find_tokenized, save_llama, save_pairs, save_tokenizer
from support.workers import WorkerGroup
from transformers import AutoModelForCausalLM

from data.storage.rows import Rows, count_rows, list_rows
from data.storage.tokenized import TokenizedDataset
from training.config.schema import RunConfig
from training.inputs.datasets import build_order, build_row_plan

NUM_SAMPLES = 21  # pairs, or answers with a label: no multiple of any batch
TENSOR_PARALLEL = {"tp2": (1, 2), "tp2xpp2": (2, 4)}  # each layer on two ranks
# Where packed rows have to be equal too, beyond stages and replicas of stages
PACKED_LAYOUTS = (("dp2", ()), ("tp2", ()), ("zero3", ()), ("pp2", ("schedule=zero_bubble",)))

Summarize = Callable[[list[Any]], dict[str, float]]
ComputeStep = Callable[[list[int]], tuple[Iterable[tuple[torch.Tensor, Any]], Summarize]]
"""Of the ids of a step's samples: the loss of each, as they are asked for, with what its metrics are made of; and the
means of those metrics."""


def save_material(root: Path) -> Path:
    """`tiedFalse` and `tiedTrue`, models with tokenizers, and pairs in train.jsonl."""
    for tied in (False, True):
        save_llama(root / f"tied{tied}", tied=tied)
        save_tokenizer(root / f"tied{tied}")
    save_pairs(root / "train.jsonl", NUM_SAMPLES)
    return root


def build_case(
    root: Path, workdir: Path, layout: str, *overrides: str, tied: bool = False, steps: int = 3, file: str = "train"
) -> Case:
    """Returns a run on the model and data that `save_material` has saved in `root`."""
    num_stages, world_size = (LAYOUTS | DATA_PARALLEL | TENSOR_PARALLEL | CONTEXT_PARALLEL | ZERO_LAYOUTS)[layout]
    if layout in TENSOR_PARALLEL:
        overrides = ("tensor_parallel_size=2", *overrides)
    if layout in ZERO_LAYOUTS:
        overrides = (f"zero_stage={layout[-1]}", *overrides)
    if layout in CONTEXT_PARALLEL:
        overrides = ("context_parallel_size=2", *overrides)
    return Case(root / f"tied{tied}", root / f"{file}.jsonl", workdir, num_stages, world_size, steps, overrides)


def replace_model(case: Case, folder: Path, family: str = "qwen3_moe") -> Case:
    """Return the run with a model of another family, by default a mixture of experts, saved in `folder`."""
    save_tokenizer(save_family(folder, family))
    return replace(case, model=folder)


def train_answers(case: Case) -> dict[str, Any]:
    """Losses, gradient norms, metrics and final weights of a run on this rank."""
    from training.inputs.step_totals import SharedTotals
    from training.objectives.registry import get_objective

    engine, loaders, config, layout, _ = build_all(case)
    loader, first_pass = loaders.train, loaders.first_pass
    micro_batches, totals = loader.iterate(0, case.steps), SharedTotals(loader, case.steps)
    first = None if first_pass is None else loader.first.iterate(0, case.steps)
    metrics = get_objective(config).metrics(engine.module.loss_fn, engine.device)
    assert metrics is not None
    result: dict[str, Any] = {"losses": [], "norms": [], "metrics": []}
    for step in range(case.steps):
        known = totals.get(step)
        if first_pass is not None:
            first_pass.prepare(first, layout.gradient_accumulation_steps, known.num_samples)
        result["losses"].append(engine.train_step(micro_batches, step, case.steps, totals=known)[0].item())
        result["norms"].append(float(engine.gradient_norm()))
        metrics.add_step(counts=True)
        result["metrics"].append(metrics.finish_interval())
    return result | {"weights": hf_weights(engine)}


def list_groups(config: RunConfig, folder: Path, step: int) -> list[int]:
    """Return the samples of a step's global batch, or the groups of them that stay together, by their numbers in a
    tokenized folder; packed or not."""
    plan = build_row_plan(config, "train_file")
    order = build_order(config, folder, count_rows(folder, plan), config.global_batch_size)
    rows = list_rows(order.sample_ids(step), plan.rows_per_group)
    samples = Rows(folder, plan, False, False).list_samples(rows)
    return (samples[:: plan.group_size] // plan.group_size).tolist()


def train_plainly(
    case: Case,
    model: torch.nn.Module,
    compute_step: Callable[[list[int]], tuple[torch.Tensor, dict[str, float]]],
    steps: Sequence[int] | None = None,
) -> dict[str, Any]:
    """The same steps of SGD on a plain model. compute_step: of the samples of a step, or of their groups, the loss and
    the metrics; a loss without a graph has left its gradient already. steps: by default all of the case's."""
    config, folder = case.config(), find_tokenized(case.workdir)[0]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=config.learning_rate)
    result: dict[str, Any] = {"losses": [], "norms": [], "metrics": []}
    for step in steps or range(case.steps):
        optimizer.zero_grad()
        loss, metrics = compute_step(list_groups(config, folder, step))
        if loss.requires_grad:
            loss.backward()
        result["losses"].append(loss.item())
        result["norms"].append(float(torch.nn.utils.clip_grad_norm_(trained, config.max_grad_norm or float("inf"))))
        result["metrics"].append(metrics)
        optimizer.step()
    return result | {"weights": {name: tensor.detach().clone() for name, tensor in model.named_parameters()}}


def train_oracle(
    case: Case, policy: torch.nn.Module, compute_step: ComputeStep, steps: Sequence[int] | None = None
) -> dict[str, Any]:
    """`train_plainly`, sample by sample."""

    def compute(ids: list[int]) -> tuple[torch.Tensor, dict[str, float]]:
        loss, reported = torch.zeros((), dtype=torch.float64), []
        terms, summarize = compute_step(ids)
        for sample_loss, report in terms:
            (sample_loss / len(ids)).backward()
            loss += sample_loss.item() / len(ids)
            reported.append(report)
        return loss, summarize(reported)

    return train_plainly(case, policy, compute, steps)


def check_steps(result: Mapping[str, Any], oracle: Mapping[str, Any], weights: bool = True) -> None:
    """Check losses, norms and the metrics that the oracle has; weights: those of both, by name, too."""
    torch.testing.assert_close(result["losses"], oracle["losses"], rtol=BOUND, atol=0)
    torch.testing.assert_close(result["norms"], oracle["norms"], rtol=BOUND, atol=0)
    for found, expected in zip(result["metrics"], oracle["metrics"], strict=True):
        scale = max(map(abs, expected.values()), default=1.0)
        assert {name: found[name] for name in expected} == pytest.approx(expected, abs=BOUND * scale)
    if weights:
        worst, name = worst_difference(result["weights"], oracle["weights"])
        assert worst < BOUND, name
        assert max(result["losses"]) > 1.01 * min(result["losses"])  # it has moved


def check_equal(result: Mapping[str, Any], oracle: Mapping[str, Any], first_metrics: int = 0) -> None:
    """first_metrics: the step from which on rewards are compared: in the first those of a policy that is its reference
    are all 0."""
    torch.testing.assert_close(result["losses"], oracle["losses"], rtol=BOUND, atol=0)
    torch.testing.assert_close(result["norms"], oracle["norms"], rtol=BOUND, atol=0)
    for found, expected in zip(result["metrics"][first_metrics:], oracle["metrics"][first_metrics:], strict=True):
        assert found.keys() == expected.keys()
        assert found["rewards_accuracy"] == pytest.approx(expected["rewards_accuracy"])
        scale = max(abs(value) for value in expected.values())
        assert all(found[name] == pytest.approx(expected[name], abs=BOUND * scale) for name in expected), (
            found,
            expected,
        )


def start_runs(
    workers: Callable[[int], WorkerGroup], root: Path, tmp_path: Path, build: Callable[..., Case], *common: str
) -> Callable[..., list[dict[str, Any]]]:
    """run(name, layout, *overrides): the metrics of a whole run with AdamW, which is evaluated on its own training
    samples. build: the file's `build_case`."""

    def run(name: str, layout: str, *overrides: str, **given: bool) -> list[dict[str, Any]]:
        defaults = (
            f"output_dir={tmp_path / name}", f"eval_file={root}/train.jsonl", "eval_on_start=true", "optimizer=adamw",
            "learning_rate=1e-3", "max_grad_norm=1.0", "max_steps=6", "logging_steps=1", "micro_batch_size=2",
        )  # fmt: skip
        case = build(root, tmp_path, layout, *defaults, *common, *overrides, **given)
        workers(case.world_size).run(train_run, case)
        file = tmp_path / name / "metrics.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []

    return run


def check_continued(
    whole: list[dict[str, Any]], ended: list[dict[str, Any]], names: Iterable[str], absolute: float | None = None
) -> None:
    """Steps 4 to 6 of a run that was stopped after 3 and of one that was not; Adam divides rounding by itself."""
    steps = [[record for record in records if "loss" in record and record["step"] > 3] for records in (whole, ended)]
    assert [record["step"] for record in steps[0]] == [4, 5, 6]
    for expected, found in zip(*steps, strict=True):
        near = pytest.approx({name: expected[name] for name in names}, rel=1e-4, abs=absolute)
        assert {name: found[name] for name in names} == near


def check_resumed(
    run: Callable[..., list[dict[str, Any]]],
    folder: Path,
    layouts: tuple[str, str],
    *overrides: str,
    metrics: Iterable[str] = (),
    **given: bool,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Check that a run continues at another layout after 3 of 6 steps as if it had not been stopped, and return the
    metrics of the one that was not, and of what continued. run: of `start_runs`, in `folder`."""
    saved, resumed = layouts
    whole = run("whole", saved, *overrides, **given)
    begun = run("begun", saved, "stop_after_steps=3", *overrides, **given)
    assert [record["step"] for record in begun if "loss" in record] == [1, 2, 3]
    ended = run("ended", resumed, f"resume={folder}/begun/checkpoints", *overrides, **given)
    check_continued(whole, ended, ("loss", "grad_norm", *metrics), absolute=1e-5)
    return whole, ended


def check_record(record: Mapping[str, Any], expected: Mapping[str, float]) -> None:
    """Check what an evaluation has reported."""
    assert {name: record[name] for name in expected} == pytest.approx(expected, rel=1e-6, abs=1e-6)


def convert(source: Path, target: Path, *flags: str) -> None:
    command = [sys.executable, "convert2ckpt.py", "--model_name_or_path", str(source), "--output_dir", str(target)]
    subprocess.run([*command, *flags], cwd=ROOT, check=True, capture_output=True)


def find_dataset(folder: Path, num_samples: int | None = None) -> TokenizedDataset:
    """Returns the data set that the runs of `folder` have tokenized. num_samples: to choose among several files."""
    found = [TokenizedDataset(path, True, True) for path in find_tokenized(folder)]
    return next(dataset for dataset in found if num_samples in (None, len(dataset)))


def compute_log_probability(model: torch.nn.Module, input_ids: torch.Tensor, answer: torch.Tensor) -> torch.Tensor:
    """log p(answer | prompt), summed. answer: which of the tokens [T] are the answer's."""
    log_probabilities = model(input_ids[None]).logits[0, :-1].double().log_softmax(-1)
    return log_probabilities[torch.arange(len(input_ids) - 1), input_ids[1:]][answer[1:]].sum()


def load_model(folder: Any) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
