"""KTO through real pipeline stages against the paper's formula on the plain Hugging Face model in one process."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import objective_runs
from support.adapters import make_adapter, to_peft_weights
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
from support.objective_runs import (
    NUM_SAMPLES,
    PACKED_LAYOUTS,
    TENSOR_PARALLEL,
    Summarize,
    check_resumed,
    compute_log_probability,
    find_dataset,
    load_model,
    replace_model,
    save_material,
    start_runs,
    train_answers,
)
from support.tiny import save_records
from support.workers import WorkerError, WorkerGroup

WEIGHTS = ("kto.desirable_weight=1.5", "kto.undesirable_weight=0.7")
PACKED = ("data.packing=true", "micro_batch_size=1", "global_batch_size=4")
METRICS = ("rewards_desirable", "rewards_undesirable", "rewards_accuracy", "rewards_margin", "kl")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = save_material(tmp_path_factory.mktemp("kto"))
    (root / "train.jsonl").rename(root / "pairs.jsonl")
    save_records(root / "records.jsonl", NUM_SAMPLES)
    records = [json.loads(line) for line in (root / "records.jsonl").read_text().splitlines()]
    for number in range(2, NUM_SAMPLES, 5):
        records[number]["prompt"] = records[number - 1]["prompt"]  # two answers to one prompt
    lines = [json.dumps({**record, "label": number % 3 != 1}) for number, record in enumerate(records)]
    (root / "train.jsonl").write_text("\n".join(lines) + "\n")
    (root / "other.jsonl").write_text("\n".join(lines[:5]) + "\n")
    return root


def build_case(root: Path, workdir: Path, layout: str, *overrides: str, tied: bool = False) -> Case:
    given = ("data=unpaired_preference", "task=kto", "kto.beta=0.3", "learning_rate=0.2", *overrides)
    file = "pairs" if "data=preference" in overrides else "train"
    return objective_runs.build_case(root, workdir, layout, *given, tied=tied, file=file)


class Answers:
    """The samples of a case in the paper's terms: prompts, answers, labels."""

    def __init__(self, case: Case, reference: torch.nn.Module, num_samples: int | None = None) -> None:
        """num_samples: those of the file where there are several; it is then the beginning of the training file."""
        dataset = find_dataset(case.workdir, num_samples)
        self.rows = []
        for i in range(len(dataset)):
            input_ids, labels = (torch.from_numpy(c(i).astype("int64")) for c in (dataset.input_ids, dataset.labels))
            self.rows.append((input_ids[labels == -100], input_ids[labels != -100]))
        if "data=preference" in case.overrides:
            self.liked = [i % 2 == 0 for i in range(len(dataset))]
            self._others = [(i + 2) % len(dataset) for i in range(len(dataset))]
        else:
            records = [json.loads(line) for line in case.train_file.read_text().splitlines()][: len(dataset)]
            self.liked = [record["label"] for record in records]
            runs = [list(run) for _, run in groupby(range(len(records)), lambda i: records[i]["prompt"])]
            following = zip(runs, [*runs[1:], runs[0]], strict=True)
            self._others = [other[place % len(other)] for run, other in following for place in range(len(run))]
        self._reference, self._max_seq_length = reference, case.config().max_seq_length

    def compute_ratio(self, policy: torch.nn.Module, i: int, mismatched: bool = False) -> torch.Tensor:
        """log p(y|x) - log r(y|x)."""
        prompt = self.rows[i][0]
        answer = self.rows[self._others[i] if mismatched else i][1]
        input_ids = torch.cat([prompt, answer])[: self._max_seq_length]
        is_answer = torch.arange(len(input_ids)) >= len(prompt)
        log_p = compute_log_probability(policy, input_ids, is_answer)
        with torch.no_grad():
            log_r = compute_log_probability(self._reference, input_ids, is_answer)
        return log_p - log_r


def compute_terms(
    config: Any, answers: Answers, policy: torch.nn.Module, ids: list[int]
) -> tuple[Iterator[tuple[torch.Tensor, float]], float]:
    """Return a lazy iterator of (loss, ratio) of each sample, and z0."""
    with torch.no_grad():
        kl = max(0.0, float(np.mean([answers.compute_ratio(policy, i, mismatched=True).item() for i in ids])))

    def compute(i: int) -> tuple[torch.Tensor, float]:
        ratio = answers.compute_ratio(policy, i)
        if answers.liked[i]:
            value = config.kto.desirable_weight * (1 - torch.sigmoid(config.kto.beta * (ratio - kl)))
        else:
            value = config.kto.undesirable_weight * (1 - torch.sigmoid(config.kto.beta * (kl - ratio)))
        return value, ratio.item()

    return (compute(i) for i in ids), kl


def summarize(config: Any, answers: Answers, ids: list[int], kl: float, ratios: list[float]) -> dict[str, float]:
    liked = np.array([answers.liked[i] for i in ids])
    rewards = config.kto.beta * np.array(ratios)
    margins = np.where(liked, 1, -1) * (rewards - config.kto.beta * kl)
    accuracy = ((np.array(ratios) > kl) == liked).mean()
    means = (rewards[liked].mean(), rewards[~liked].mean(), accuracy, margins.mean(), kl)
    return dict(zip(METRICS, map(float, means), strict=True))


def train_oracle(
    case: Case, policy: torch.nn.Module, reference: torch.nn.Module, steps: Sequence[int] | None = None
) -> dict[str, Any]:
    """The same steps of SGD, answer by answer. steps: by default all of the case's."""
    config, answers = case.config(), Answers(case, reference)

    def compute_step(ids: list[int]) -> tuple[Iterator[tuple[torch.Tensor, float]], Summarize]:
        terms, kl = compute_terms(config, answers, policy, ids)
        return terms, partial(summarize, config, answers, ids, kl)

    return objective_runs.train_oracle(case, policy, compute_step, steps)


def check_equal(result: dict[str, Any], oracle: dict[str, Any], first_metrics: int = 1) -> None:
    """first_metrics: see `objective_runs.check_equal`."""
    assert min(metrics["kl"] for metrics in oracle["metrics"][1:]) > 0.1  # z0 is not clamped at 0
    objective_runs.check_equal(result, oracle, first_metrics)


@pytest.mark.parametrize(
    ("layout", "tied", "overrides"),
    [
        ("pp2", False, (*WEIGHTS, CLIPPED)),
        ("pp2", True, (*PACKED, *WEIGHTS, CHECKPOINTED)),
        *(
            pytest.param(layout, False, (*PACKED, *WEIGHTS), marks=pytest.mark.full)
            for layout in ("pp1", "pp2", "pp2xdp2", "cp2")
        ),
        *(
            pytest.param(layout, False, (*PACKED, *WEIGHTS, *overrides), marks=pytest.mark.full)
            for layout, overrides in PACKED_LAYOUTS
        ),
        pytest.param("pp2xdp2", False, (*PACKED, "data=preference"), marks=pytest.mark.full),
        pytest.param("cp2", False, (RING, *WEIGHTS, CLIPPED), marks=pytest.mark.full),
        *(
            pytest.param(layout, tied, overrides, marks=pytest.mark.full)
            for layout in (*LAYOUTS, *TENSOR_PARALLEL, *CONTEXT_PARALLEL, *ZERO_LAYOUTS)
            for tied, overrides in (
                (True, (*WEIGHTS, CHECKPOINTED, "micro_batch_size=1")),
                (False, ("data=preference", "data.pad_to=max_seq_length")),
            )
        ),
        *(
            pytest.param("pp2", True, (f"schedule={name}", *WEIGHTS, *overrides), marks=pytest.mark.full)
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
    result = merge(workers(case.world_size).run(train_answers, case))
    policy = load_model(case.model)
    oracle = train_oracle(case, policy, copy.deepcopy(policy))
    check_equal(result, oracle)
    assert worst_difference(result["weights"], oracle["weights"])[0] < BOUND
    assert max(result["losses"]) > 1.001 * min(result["losses"])  # it has moved


@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1"])
def test_no_state_passes_from_an_answer_to_the_next(
    workers: Callable[[int], WorkerGroup], root: Path, tmp_path: Path, family: str
) -> None:
    """Also in the pass before a step: linear attention with experts, and state spaces next to attention."""
    case = build_case(root, tmp_path, "pp2", *PACKED, *WEIGHTS, CLIPPED)
    case = replace_model(case, tmp_path / "model", family)
    result = merge(workers(case.world_size).run(train_answers, case))
    policy = load_model(case.model)
    oracle = train_oracle(case, policy, copy.deepcopy(policy))
    check_equal(result, oracle)
    assert worst_difference(result["weights"], oracle["weights"])[0] < BOUND


@pytest.mark.full
def test_ranks_that_divide_experts(workers: Callable[[int], WorkerGroup], root: Path, tmp_path: Path) -> None:
    """The pass before a step exchanges rows too."""
    case = build_case(root, tmp_path, "pp2xdp2", *WEIGHTS, "expert_parallel_size=2")
    case = replace_model(case, tmp_path / "model")
    result = merge(workers(case.world_size).run(train_answers, case))
    policy = load_model(case.model)
    oracle = train_oracle(case, policy, copy.deepcopy(policy))
    check_equal(result, oracle)
    assert worst_difference(result["weights"], oracle["weights"])[0] < BOUND


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "overrides"),
    [
        *((layout, ()) for layout in ("pp1", "pp2", "pp2xdp2", "tp2", *ZERO_LAYOUTS)),
        ("pp2", (*PACKED, "max_grad_norm=1.0")),
    ],
)
def test_with_an_adapter_the_reference_is_the_model_without_it(
    workers: Callable[[int], WorkerGroup], root: Path, tmp_path: Path, layout: str, overrides: tuple[str, ...]
) -> None:
    """The adapter starts far from zero, so that the policy is not its reference in the first step either."""
    policy = make_adapter(tmp_path / "adapter", root / "tiedFalse")
    lora = ("adapter=lora", f"adapter.name_or_path={tmp_path}/adapter", CLIPPED)
    case = build_case(root, tmp_path, layout, *lora, *overrides)
    result = merge(workers(case.world_size).run(train_answers, case))
    oracle = train_oracle(case, policy, load_model(case.model))
    check_equal(result, oracle, first_metrics=0)
    worst, name = worst_difference(*to_peft_weights(result, oracle, policy.config))
    assert worst < BOUND, name


@pytest.fixture
def run(workers: Callable[[int], WorkerGroup], root: Path, tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    return start_runs(workers, root, tmp_path, build_case)


@pytest.mark.full
@pytest.mark.parametrize(
    ("saved", "resumed", "overrides"),
    [
        ("pp2", "pp1", ()),
        ("pp2", "pp1", PACKED),
        ("pp2xdp2", "pp2xdp2", PACKED),
        ("pp2xdp2", "pp2", ()),
        ("tp2", "pp2xdp2", ()),
        ("zero3", "pp2", ()),
        ("pp2", "zero3", ()),
        ("zero2", "zero3", ()),
        ("cp2", "pp2", ()),
    ],
)
def test_a_run_learns_and_continues_at_another_layout(
    run, root: Path, tmp_path: Path, saved: str, resumed: str, overrides: tuple[str, ...]
) -> None:
    """Evaluations too: their z0 is a mean over the whole file, 21 samples in micro-batches that do not divide them."""
    whole, ended = check_resumed(run, tmp_path, (saved, resumed), *overrides, metrics=METRICS)
    assert whole[0]["eval_loss"] == pytest.approx(0.5, rel=1e-5) and whole[-1]["eval_loss"] < 0.45
    case = build_case(root, tmp_path, "pp1")
    expected = evaluate_oracle(case, tmp_path / "ended" / "hf", NUM_SAMPLES)
    assert expected["eval_kl"] > 0.1
    assert {name: ended[-1][name] for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-5)


def evaluate_oracle(case: Case, folder: Path, num_samples: int) -> dict[str, float]:
    """Evaluate the model in `folder`."""
    answers, ids = Answers(case, load_model(case.model), num_samples), list(range(num_samples))
    with torch.no_grad():
        terms, kl = compute_terms(case.config(), answers, load_model(folder), ids)
        losses, ratios = zip(*((loss.item(), ratio) for loss, ratio in terms), strict=True)
    means = summarize(case.config(), answers, ids, kl, list(ratios))
    return {"eval_loss": float(np.mean(losses))} | {f"eval_{name}": value for name, value in means.items()}


@pytest.mark.full
def test_each_evaluation_file_has_its_own_reference_point(run, root: Path, tmp_path: Path) -> None:
    files = f"eval_file={{whole: {root}/train.jsonl, part: {root}/other.jsonl}}"
    lines = run("named", "pp2xdp2", files)
    case = build_case(root, tmp_path, "pp1")
    found, means = lines[-1], []
    for name, num_samples in (("whole", NUM_SAMPLES), ("part", 5)):
        expected = evaluate_oracle(case, tmp_path / "named" / "hf", num_samples)
        file_metrics = {key: found[key.replace("eval_", f"eval_{name}_", 1)] for key in expected}
        assert file_metrics == pytest.approx(expected, rel=1e-4, abs=1e-5)
        means.append((expected["eval_loss"], num_samples, expected["eval_kl"]))
    assert means[0][2] != pytest.approx(means[1][2], rel=0.1) and max(means[0][2], means[1][2]) > 0.1
    whole = sum(loss * number for loss, number, _ in means) / (NUM_SAMPLES + 5)
    assert found["eval_loss"] == pytest.approx(whole, rel=1e-4)


@pytest.mark.full
def test_skipped_steps_have_no_reference_point(run, root: Path, tmp_path: Path) -> None:
    """Steps of `skip_data_intervals` are not scored by the first pass."""
    keys = ("skip_data_intervals=[[2,2]]", "optimizer=sgd", "learning_rate=0.2", "max_grad_norm=1.0", "max_steps=4")
    constant = ("lr_scheduler_type=constant", "warmup_ratio=0", "eval_file=null", "eval_on_start=false")
    lines = run("skipped", "pp2", *keys, *constant)
    case = build_case(root, tmp_path, "pp1", *keys, *constant)
    oracle = train_oracle(case, load_model(case.model), load_model(case.model), steps=[0, 2, 3])
    assert [line["step"] for line in lines] == [1, 3, 4] and oracle["metrics"][1]["kl"] > 0.1
    for name in ("kl", "rewards_margin"):
        assert [line[name] for line in lines[1:]] == pytest.approx(
            [each[name] for each in oracle["metrics"][1:]], rel=1e-4
        )
    assert [line["loss"] for line in lines] == pytest.approx(oracle["losses"], rel=BOUND)


@pytest.mark.full
def test_another_loss_and_one_label_alone_are_named(run, root: Path, tmp_path: Path) -> None:
    run("begun", "pp1", "stop_after_steps=1")
    with pytest.raises(WorkerError, match="kto.desirable_weight was 1, is 2. Give the same"):
        run("other", "pp1", f"resume={tmp_path}/begun/checkpoints", "kto.desirable_weight=2")
    liked = [json.loads(line) | {"label": True} for line in (root / "train.jsonl").read_text().splitlines()]
    (tmp_path / "liked.jsonl").write_text("\n".join(map(json.dumps, liked)))
    with pytest.raises(WorkerError, match="train_file: all labels are true, of 21 samples; task=kto learns from"):
        run("liked", "pp1", f"train_file={tmp_path}/liked.jsonl")
    alike = [record | {"prompt": "What?", "label": number % 2 == 0} for number, record in enumerate(liked)]
    (tmp_path / "alike.jsonl").write_text("\n".join(map(json.dumps, alike)))
    with pytest.raises(WorkerError, match="train_file: there is one prompt alone, of 21 records, so there is no"):
        run("alike", "pp1", f"train_file={tmp_path}/alike.jsonl")
