"""Reward models through real pipeline stages against the Bradley-Terry loss on transformers' own class in one process:
steps, evaluations, checkpoints at other layouts, and what is exported."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import objective_runs
from support.cases import (
    BOUND,
    CHECKPOINTED,
    CLIPPED,
    CONTEXT_PARALLEL,
    LAYOUTS,
    RING,
    ZERO_LAYOUTS,
    Case,
    merge,
    worst_difference,
)
from support.head_runs import check_adapter_steps, load_oracle, load_with_adapter
from support.objective_runs import (
    PACKED_LAYOUTS,
    TENSOR_PARALLEL,
    Summarize,
    check_equal,
    check_resumed,
    convert,
    find_dataset,
    replace_model,
    save_material,
    start_runs,
    train_answers,
)
from support.pair_runs import REWARDS
from support.tiny import save_llama, save_tokenizer
from support.workers import WorkerError, WorkerGroup
from torch.nn import functional as F
from transformers import AutoModelForSequenceClassification

from batch import Targets
from data.storage.tokenized import TokenizedDataset
from errors import UserError
from extensions.preferences.reward import RewardLoss
from models.weights.sources import open_weights
from scripts.generate import load_model

CENTERED = "reward.centering_coef=0.05"
PACKED = ("data.packing=true", "max_seq_length=512", "global_batch_size=4")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_material(tmp_path_factory.mktemp("reward"))


def build_case(root: Path, workdir: Path, layout: str, *overrides: str, tied: bool = False) -> Case:
    given = ("data=preference", "task=reward", "micro_batch_size=1", "learning_rate=0.05", *overrides)
    return objective_runs.build_case(root, workdir, layout, *given, tied=tied)


def compute_scores(model: torch.nn.Module, dataset: TokenizedDataset, pair: int) -> torch.Tensor:
    """Return the scores of both answers, each computed alone, [2]."""
    rows = [torch.from_numpy(dataset.input_ids(i).astype("int64"))[None] for i in (2 * pair, 2 * pair + 1)]
    return torch.cat([model(row, use_cache=False).logits[0] for row in rows])


def compute_loss(scores: torch.Tensor, centering_coef: float) -> torch.Tensor:
    return -torch.log(torch.sigmoid(scores[0] - scores[1])) + centering_coef * (scores[0] + scores[1]) ** 2


def summarize(scores: list[list[float]]) -> dict[str, float]:
    chosen, rejected = np.array(scores).T
    means = (chosen.mean(), rejected.mean(), (chosen - rejected).mean(), (chosen > rejected).mean())
    return dict(zip(REWARDS, map(float, means), strict=True))


def train_oracle(case: Case, model: torch.nn.Module) -> dict[str, Any]:
    """Run the same steps of SGD, pair by pair."""
    config, dataset = case.config(), find_dataset(case.workdir)

    def compute_step(ids: list[int]) -> tuple[Iterator[tuple[torch.Tensor, list[float]]], Summarize]:
        scores = (compute_scores(model, dataset, pair) for pair in ids)
        coefficient = config.reward.centering_coef
        return ((compute_loss(pair_scores, coefficient), pair_scores.tolist()) for pair_scores in scores), summarize

    return objective_runs.train_oracle(case, model, compute_step)


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
            pytest.param(layout, False, (*PACKED, CENTERED, *overrides), marks=pytest.mark.full)
            for layout in ("pp1", "pp2", "pp2xdp2", "cp2")
            for overrides in ((), (CHECKPOINTED,))
        ),
        *(
            pytest.param(layout, False, (*PACKED, CENTERED, *overrides), marks=pytest.mark.full)
            for layout, overrides in PACKED_LAYOUTS
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
    result = merge(workers(case.world_size).run(train_answers, case))
    oracle = train_oracle(case, model)
    check_equal(result, oracle)
    assert worst_difference(result["weights"], oracle["weights"])[0] < BOUND
    assert max(result["losses"]) > 1.01 * min(result["losses"])  # it has moved


@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen3_next", "jamba"])
def test_no_state_passes_from_an_answer_to_the_next(
    workers: Callable[[int], WorkerGroup], root: Path, tmp_path: Path, family: str
) -> None:
    """Linear attention, and state spaces between layers of attention, both with experts."""
    small = "learning_rate=0.005"  # larger steps amplify rounding
    case = replace_model(build_case(root, tmp_path, "pp2", *PACKED, CENTERED, small), tmp_path / "model", family)
    model = load_oracle(case)
    result = merge(workers(case.world_size).run(train_answers, case))
    oracle = train_oracle(case, model)
    check_equal(result, oracle)
    assert worst_difference(result["weights"], oracle["weights"])[0] < BOUND


@pytest.fixture
def run(workers: Callable[[int], WorkerGroup], root: Path, tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    return start_runs(workers, root, tmp_path, build_case)


def evaluate_folder(folder: Path, tmp_path: Path) -> dict[str, float]:
    """Evaluate the export by transformers, in one padded batch, as users do."""
    model, report = AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values()), report  # no tensor is missing, none is unexpected
    assert model.config.num_labels == 1
    return evaluate_model(model, tmp_path)


def evaluate_model(model: torch.nn.Module, tmp_path: Path) -> dict[str, float]:
    dataset = find_dataset(tmp_path)
    rows = [torch.from_numpy(dataset.input_ids(i).astype("int64")) for i in range(len(dataset))]
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=model.config.pad_token_id)
    with torch.no_grad():
        mask = (padded != model.config.pad_token_id).int()
        scores = model.eval()(padded, attention_mask=mask, use_cache=False).logits.view(-1, 2)
    loss = torch.stack([compute_loss(pair, 0.0) for pair in scores]).mean().item()
    return {"eval_loss": loss} | {f"eval_{name}": value for name, value in summarize(scores.tolist()).items()}


@pytest.mark.parametrize(
    ("saved", "resumed", "tied", "overrides"),
    [
        pytest.param("pp2", "pp1", True, (), marks=pytest.mark.full),
        *(
            pytest.param("pp2xdp2", resumed, False, (*PACKED, "max_seq_length=768"), marks=pytest.mark.full)
            for resumed in ("pp2", "pp2xdp2")
        ),
        *(
            pytest.param(*pair, tied, (), marks=pytest.mark.full)
            for pair in (("pp2xdp2", "pp2"), ("pp1", "tp2xpp2"), ("tp2", "pp4"), ("zero3", "zero2"))
            for tied in (False, True)
        ),
    ],
)
def test_a_run_learns_continues_at_another_layout_and_is_exported(
    run, root: Path, tmp_path: Path, saved: str, resumed: str, tied: bool, overrides: tuple[str, ...]
) -> None:
    whole, ended = check_resumed(run, tmp_path, (saved, resumed), *overrides, metrics=REWARDS, tied=tied)
    assert whole[-1]["eval_rewards_accuracy"] > 0.9 and whole[-1]["eval_rewards_margin"] > 0.5
    expected = evaluate_folder(tmp_path / "ended" / "hf", tmp_path)
    assert {name: ended[-1][name] for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-5)


@pytest.mark.full
def test_an_exported_model_is_converted_evaluated_and_trained_on(run, root: Path, tmp_path: Path) -> None:
    """Also by the converter, in both directions; the head is loaded, not initialized."""
    first = run("first", "pp1", "max_steps=2")
    hf, pipeline, back = tmp_path / "first" / "hf", tmp_path / "pipeline", tmp_path / "back"
    convert(hf, pipeline)
    convert(pipeline, back, "--to_hf")
    assert evaluate_folder(back, tmp_path) == evaluate_folder(hf, tmp_path)
    for name, folder in (("from_hf", hf), ("from_pipeline", pipeline)):
        run(name, "pp2", "evaluate_only=true", f"model_name_or_path={folder}")
        evaluation = json.loads((tmp_path / name / "evaluation.json").read_text())
        assert evaluation["eval_rewards_margin"] == pytest.approx(first[-1]["eval_rewards_margin"], rel=BOUND)
    again = run("again", "pp2", "max_steps=1", f"model_name_or_path={hf}")
    assert again[0]["eval_rewards_margin"] == pytest.approx(first[-1]["eval_rewards_margin"], rel=BOUND)

    with pytest.raises(UserError, match="is a sequence classifier .LlamaForSequenceClassification.: it writes no text"):
        load_model(open_weights(str(hf)))
    with pytest.raises(WorkerError, match="is a sequence classifier .LlamaForSequenceClassification., which has no LM"):
        run("dpo", "pp1", "task=dpo", f"model_name_or_path={hf}")
    with pytest.raises(WorkerError, match="evaluate_only=true with task=reward: .* is not a sequence classifier"):
        run("causal", "pp1", "evaluate_only=true")


@pytest.mark.full
@pytest.mark.parametrize("layout", ["pp2", "tp2"])
def test_the_score_head_is_trained_and_saved_with_adapters(run, root: Path, tmp_path: Path, layout: str) -> None:
    lora = ("adapter=lora", "adapter.r=4", "learning_rate=3e-3")
    whole, ended = check_resumed(run, tmp_path, (layout, "pp1"), *lora, metrics=REWARDS)
    assert whole[-1]["eval_loss"] < whole[0]["eval_loss"]
    expected = evaluate_model(load_with_adapter(root / "tiedFalse", tmp_path / "ended" / "hf", 1), tmp_path)
    assert {name: ended[-1][name] for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("overrides", [(), PACKED], ids=["unpacked", "packed"])
def test_three_sgd_steps_with_adapters_equal_peft(
    workers: Callable[[int], WorkerGroup], run, root: Path, tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    """From an exported adapter, so that its matrices and its head have gradients in the first step."""
    run("first", "pp1", "adapter=lora", "adapter.r=4", "learning_rate=1e-2", "max_steps=2", *overrides)
    adapter = tmp_path / "first" / "hf"
    # larger steps amplify rounding
    lora = ("adapter=lora", f"adapter.name_or_path={adapter}", "learning_rate=0.003")
    case = build_case(root, tmp_path, "pp2", *lora, CHECKPOINTED, *overrides)
    oracle_model = load_with_adapter(root / "tiedFalse", adapter, 1)
    result = merge(workers(case.world_size).run(train_answers, case))
    check_adapter_steps(result, train_oracle(case, oracle_model))


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


@pytest.mark.parametrize("centering_coef", [0.0, 0.3])
def test_the_loss_equals_its_formula(centering_coef: float) -> None:
    """The last pair fills the batch, with hidden states that are not finite."""
    values = torch.tensor([1.0, -2.0, 0.5, 0.7, torch.inf, torch.nan], requires_grad=True)
    hidden_states = values[:, None, None].expand(6, 2, 1)  # [B, T, D]
    targets = torch.tensor([[-100, 0], [1, -100], [-100, 2], [-100, 3], [-100, -100], [-100, -100]])
    targets = Targets.find(targets, torch.tensor(2.0), columns={"labels": torch.zeros(4, 0)})
    loss = RewardLoss(centering_coef)
    found = loss((hidden_states, torch.ones(1, 1)), targets)
    differences, sums = torch.tensor([3.0, -0.2]), torch.tensor([-1.0, 1.2])
    expected = (-F.logsigmoid(differences) + centering_coef * sums.square()).sum() / 2
    torch.testing.assert_close(found, expected)
    (gradient,) = torch.autograd.grad(found, values)
    assert gradient.isfinite().all() and gradient[4:].eq(0).all() and gradient[:4].ne(0).all()
    totals = loss.sums[0].take()
    assert totals is not None and totals[1].tolist() == [2, 2, 2, 2]
    torch.testing.assert_close(totals[0].float(), torch.tensor([1.5, -1.3, 2.8, 1.0]))
    assert loss.sums[0].take() is None
