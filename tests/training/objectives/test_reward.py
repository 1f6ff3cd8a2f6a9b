"""Reward models through real pipeline stages against the Bradley-Terry loss on transformers' own class in one process:
steps, evaluations, checkpoints at other layouts, and what is exported."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.cases import (
    BOUND,
    CHECKPOINTED,
    CLIPPED,
    CONTEXT_PARALLEL,
    LAYOUTS,
    RING,
    ROOT,
    ZERO_LAYOUTS,
    Case,
    build_engine,
    hf_weights,
    merge,
    train_run,
    worst_difference,
)
from support.tiny import save_llama, save_pairs, save_tokenizer
from support.workers import WorkerError, WorkerGroup
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from data.order import GlobalOrder
from data.storage.tokenized import TokenizedDataset
from errors import UserError
from models.architecture import build_layers
from models.weights.reward import as_reward_model
from models.weights.sources import open_weights
from scripts.generate import load_model

NUM_PAIRS = 21  # no multiple of any batch
CENTERED = "reward.centering_coef=0.05"
TENSOR_PARALLEL = {"tp2": (1, 2), "tp2xpp2": (2, 4)}
REWARDS = ("rewards_chosen", "rewards_rejected", "rewards_margin", "rewards_accuracy")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("reward")
    for tied in (False, True):
        save_llama(root / f"tied{tied}", tied=tied)
        save_tokenizer(root / f"tied{tied}")
    save_pairs(root / "train.jsonl", NUM_PAIRS)
    return root


def build_case(root: Path, workdir: Path, layout: str, *overrides: str, tied: bool = False) -> Case:
    num_stages, world_size = (LAYOUTS | TENSOR_PARALLEL | CONTEXT_PARALLEL | ZERO_LAYOUTS)[layout]
    if layout in TENSOR_PARALLEL:
        overrides = ("tensor_parallel_size=2", *overrides)
    if layout in ZERO_LAYOUTS:
        overrides = (f"zero_stage={layout[-1]}", *overrides)
    if layout in CONTEXT_PARALLEL:
        overrides = ("context_parallel_size=2", *overrides)
    given = ("data=preference", "task=reward", "micro_batch_size=1", "learning_rate=0.05", *overrides)
    return Case(root / f"tied{tied}", root / "train.jsonl", workdir, num_stages, world_size, steps=3, overrides=given)


def load_oracle(case: Case) -> PreTrainedModel:
    """transformers' own class, with the head that the run draws."""
    config = case.config()
    source = as_reward_model(open_weights(config.model_name_or_path), config.seed)
    layers = build_layers(source.config)
    tensors = {
        layer.hf_prefix + name: tensor.clone()
        for index, layer in enumerate(layers)
        for name, tensor in source.read_layer(index, layer).items()
    }
    model = AutoModelForSequenceClassification.from_config(source.config, dtype=torch.float32)
    model.load_state_dict(tensors)
    return model


def compute_scores(model: torch.nn.Module, dataset: TokenizedDataset, pair: int) -> torch.Tensor:
    """Of both answers, each by itself, [2]."""
    rows = [torch.from_numpy(dataset.input_ids(i).astype("int64"))[None] for i in (2 * pair, 2 * pair + 1)]
    return torch.cat([model(row, use_cache=False).logits[0] for row in rows])


def compute_loss(scores: torch.Tensor, centering_coef: float) -> torch.Tensor:
    return -torch.log(torch.sigmoid(scores[0] - scores[1])) + centering_coef * (scores[0] + scores[1]) ** 2


def summarize(scores: list[list[float]]) -> dict[str, float]:
    chosen, rejected = np.array(scores).T
    means = (chosen.mean(), rejected.mean(), (chosen - rejected).mean(), (chosen > rejected).mean())
    return dict(zip(REWARDS, map(float, means), strict=True))


def find_dataset(case: Case) -> TokenizedDataset:
    return TokenizedDataset(next(path for path in (case.workdir / "cache").iterdir() if path.is_dir()), True, True)


def train_rewards(case: Case) -> dict[str, Any]:
    """Losses, gradient norms, metrics and final weights of a run on this rank."""
    from training.engine.steps import train_step
    from training.objectives.registry import get_objective

    engine, loader, config, *_ = build_engine(case)
    micro_batches = loader.iterate(0, case.steps)
    metrics = get_objective(config).build_metrics(engine.module.loss_fn, engine.device)
    assert metrics is not None
    result: dict[str, Any] = {"losses": [], "norms": [], "metrics": []}
    for step in range(case.steps):
        result["losses"].append(train_step(engine, micro_batches, config, step, case.steps)[0].item())
        result["norms"].append(float(engine.gradient_norm()))
        metrics.add_step(counts=True)
        result["metrics"].append(metrics.finish_interval())
    return result | {"weights": hf_weights(engine)}


def train_oracle(case: Case, model: torch.nn.Module) -> dict[str, Any]:
    """The same steps of SGD, pair by pair."""
    config, dataset = case.config(), find_dataset(case)
    order = GlobalOrder(NUM_PAIRS, config.global_batch_size, config.seed)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=config.learning_rate)
    result: dict[str, Any] = {"losses": [], "norms": [], "metrics": []}
    for step in range(case.steps):
        optimizer.zero_grad()
        ids, loss, scores = order.sample_ids(step).tolist(), 0.0, []
        for pair in ids:
            of_pair = compute_scores(model, dataset, pair)
            term = compute_loss(of_pair, config.reward.centering_coef) / len(ids)
            term.backward()
            loss += term.item()
            scores.append(of_pair.tolist())
        result["losses"].append(loss)
        result["norms"].append(float(torch.nn.utils.clip_grad_norm_(trained, config.max_grad_norm or float("inf"))))
        result["metrics"].append(summarize(scores))
        optimizer.step()
    return result | {"weights": {name: tensor.detach().clone() for name, tensor in model.named_parameters()}}


def check_equal(result: dict[str, Any], oracle: dict[str, Any]) -> None:
    torch.testing.assert_close(result["losses"], oracle["losses"], rtol=BOUND, atol=0)
    torch.testing.assert_close(result["norms"], oracle["norms"], rtol=BOUND, atol=0)
    for found, expected in zip(result["metrics"], oracle["metrics"], strict=True):
        scale = max(abs(value) for value in expected.values())
        assert found == pytest.approx(expected, abs=BOUND * scale)


@pytest.mark.parametrize(
    ("layout", "tied", "overrides"),
    [
        ("pp2", True, (CENTERED, CLIPPED)),
        pytest.param("cp2", False, (RING, CENTERED), marks=pytest.mark.full),
        *(
            pytest.param(layout, tied, overrides, marks=pytest.mark.full)
            for layout in (*LAYOUTS, *TENSOR_PARALLEL, *CONTEXT_PARALLEL, *ZERO_LAYOUTS)
            for tied, overrides in (
                (False, (CENTERED, CHECKPOINTED)),
                (True, ("micro_batch_size=2", "data.pad_to=max_seq_length")),
            )
        ),
        *(
            pytest.param("pp2", True, (f"schedule={name}", *overrides), marks=pytest.mark.full)
            for name, *overrides in (("interleaved", "virtual_stages_per_rank=2"), ("zero_bubble",))
        ),
    ],
)
def test_three_sgd_steps_equal_the_paper(
    workers: Callable[[int], WorkerGroup],
    root: Path,
    tmp_path: Path,
    layout: str,
    tied: bool,
    overrides: tuple[str, ...],
) -> None:
    case = build_case(root, tmp_path, layout, *overrides, tied=tied)
    model = load_oracle(case)
    result = merge(workers(case.world_size).run(train_rewards, case))
    oracle = train_oracle(case, model)
    check_equal(result, oracle)
    assert worst_difference(result["weights"], oracle["weights"])[0] < BOUND
    assert max(result["losses"]) > 1.01 * min(result["losses"])  # it has moved


@pytest.fixture
def run(workers: Callable[[int], WorkerGroup], root: Path, tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """run(name, layout, *overrides): the metrics of a whole run, which is evaluated on its own training pairs."""

    def start(name: str, layout: str, *overrides: str, tied: bool = False) -> list[dict[str, Any]]:
        defaults = (
            f"output_dir={tmp_path / name}",
            f"eval_file={root}/train.jsonl",
            "eval_on_start=true",
            "optimizer=adamw",
            "learning_rate=1e-3",
            "max_grad_norm=1.0",
            "max_steps=6",
            "logging_steps=1",
            "micro_batch_size=2",
        )
        case = build_case(root, tmp_path, layout, *defaults, *overrides, tied=tied)
        workers(case.world_size).run(train_run, case)
        file = tmp_path / name / "metrics.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []

    return start


def evaluate_folder(folder: Path, tmp_path: Path) -> dict[str, float]:
    """By transformers, in one padded batch, as people use it."""
    model, report = AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values()), report  # no tensor is missing, none is unexpected
    assert model.config.num_labels == 1
    dataset = TokenizedDataset(next(path for path in (tmp_path / "cache").iterdir() if path.is_dir()), True, True)
    rows = [torch.from_numpy(dataset.input_ids(i).astype("int64")) for i in range(len(dataset))]
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=model.config.pad_token_id)
    with torch.no_grad():
        mask = (padded != model.config.pad_token_id).int()
        scores = model.eval()(padded, attention_mask=mask, use_cache=False).logits.view(-1, 2)
    loss = torch.stack([compute_loss(pair, 0.0) for pair in scores]).mean().item()
    return {"eval_loss": loss} | {f"eval_{name}": value for name, value in summarize(scores.tolist()).items()}


@pytest.mark.parametrize(
    ("saved", "resumed", "tied"),
    [
        pytest.param("pp2", "pp1", True, marks=pytest.mark.full),
        *(
            pytest.param(*pair, tied, marks=pytest.mark.full)
            for pair in (("pp2xdp2", "pp2"), ("pp1", "tp2xpp2"), ("tp2", "pp4"), ("zero3", "zero2"))
            for tied in (False, True)
        ),
    ],
)
def test_a_run_learns_continues_at_another_layout_and_is_exported(
    run, root: Path, tmp_path: Path, saved: str, resumed: str, tied: bool
) -> None:
    whole = run("whole", saved, tied=tied)
    begun = run("begun", saved, "stop_after_steps=3", tied=tied)
    assert [record["step"] for record in begun if "loss" in record] == [1, 2, 3]
    ended = run("ended", resumed, f"resume={tmp_path}/begun/checkpoints", tied=tied)
    steps = [
        [record for record in records if record.get("step", 0) > 3 and "loss" in record] for records in (whole, ended)
    ]
    assert [record["step"] for record in steps[0]] == [4, 5, 6]
    for expected, found in zip(*steps, strict=True):
        names = ("loss", "grad_norm", *REWARDS)
        assert {name: found[name] for name in names} == pytest.approx(
            {name: expected[name] for name in names},
            rel=1e-4,
            abs=1e-5,  # Adam divides rounding by itself
        )
    assert whole[-1]["eval_rewards_accuracy"] > 0.9 and whole[-1]["eval_rewards_margin"] > 0.5
    expected = evaluate_folder(tmp_path / "ended" / "hf", tmp_path)
    assert {name: ended[-1][name] for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-5)


@pytest.mark.full
def test_an_exported_model_is_converted_evaluated_and_trained_on(run, root: Path, tmp_path: Path) -> None:
    """Also by the converter, both ways; its head is read, not drawn."""
    first = run("first", "pp1", "max_steps=2")
    hf, pipeline, back = tmp_path / "first" / "hf", tmp_path / "pipeline", tmp_path / "back"
    for arguments in ((hf, pipeline), (pipeline, back, "--to_hf")):
        source, target, *flags = map(str, arguments)
        command = [sys.executable, "convert2ckpt.py", "--model_name_or_path", source, "--output_dir", target, *flags]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    assert evaluate_folder(back, tmp_path) == evaluate_folder(hf, tmp_path)
    for name, folder in (("of_hf", hf), ("of_pipeline", pipeline)):
        run(name, "pp2", "evaluate_only=true", f"model_name_or_path={folder}")
        evaluation = json.loads((tmp_path / name / "evaluation.json").read_text())
        assert evaluation["eval_rewards_margin"] == pytest.approx(first[-1]["eval_rewards_margin"], rel=BOUND)
    again = run("again", "pp2", "max_steps=1", f"model_name_or_path={hf}")
    assert again[0]["eval_rewards_margin"] == pytest.approx(first[-1]["eval_rewards_margin"], rel=BOUND)

    with pytest.raises(UserError, match="is a reward model .LlamaForSequenceClassification.: it scores text"):
        load_model(open_weights(str(hf)))
    with pytest.raises(WorkerError, match="is a reward model .LlamaForSequenceClassification., which has no LM head"):
        run("dpo", "pp1", "task=dpo", f"model_name_or_path={hf}")
    with pytest.raises(WorkerError, match="evaluate_only=true with task=reward: .* is not a reward model"):
        run("causal", "pp1", "evaluate_only=true")


def test_a_pad_token_that_ends_answers_is_refused(run, root: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save_llama(folder)
    tokenizer = save_tokenizer(folder)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(folder)
    with pytest.raises(WorkerError, match="task=reward: the tokenizer's pad token is its end token, '</s>'"):
        run("padded", "pp1", f"model_name_or_path={folder}")


@pytest.mark.full
def test_another_loss_is_named_by_a_resume(run, tmp_path: Path) -> None:
    run("begun", "pp1", "stop_after_steps=1")
    with pytest.raises(WorkerError, match="reward.centering_coef was 0, is 0.1. Give the same"):
        run("other", "pp1", f"resume={tmp_path}/begun/checkpoints", "reward.centering_coef=0.1")
