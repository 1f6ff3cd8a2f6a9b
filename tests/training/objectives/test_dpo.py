"""Preference optimization through real pipeline stages against the paper's formulas on the plain Hugging Face model in
one process."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.adapters import make_adapter, to_peft_weights
from support.cases import (
    BOUND,
    CHECKPOINTED,
    CLIPPED,
    CONTEXT_PARALLEL,
    LAYOUTS,
    RING,
    Case,
    merge,
    train_run,
    worst_difference,
)
from support.pair_runs import (
    REWARDS,
    check_equal,
    evaluate_oracle,
    load_model,
    train_oracle,
    train_pairs,
)
from support.tiny import save_llama, save_pairs, save_tokenizer
from support.workers import WorkerError, WorkerGroup
from transformers import AutoTokenizer

from data.storage.tokenized import TokenizedDataset

NUM_PAIRS = 21  # no multiple of any batch
DPO = ("data=preference", "task=dpo", "dpo.beta=0.3")
SMOOTHED, IPO = "dpo.label_smoothing=0.2", "dpo.loss_type=ipo"
ROBUST, HINGE, WITH_SFT = "dpo.loss_type=robust", "dpo.loss_type=hinge", "dpo.sft_coef=0.5"
TENSOR_PARALLEL = {"tp2": (1, 2), "tp2xpp2": (2, 4)}  # each layer on two ranks


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("dpo")
    for tied in (False, True):
        save_llama(root / f"tied{tied}", tied=tied)
        save_tokenizer(root / f"tied{tied}")
    save_pairs(root / "train.jsonl", NUM_PAIRS)
    return root


def build_case(root: Path, workdir: Path, layout: str, *overrides: str, tied: bool = False) -> Case:
    num_stages, world_size = (LAYOUTS | TENSOR_PARALLEL | CONTEXT_PARALLEL)[layout]
    if layout in TENSOR_PARALLEL:
        overrides = ("tensor_parallel_size=2", *overrides)
    if layout in CONTEXT_PARALLEL:
        overrides = ("context_parallel_size=2", *overrides)
    if CLIPPED not in overrides:  # a pair's gradient is that of sums over tokens
        overrides = ("learning_rate=0.02", *overrides)
    return Case(
        root / f"tied{tied}",
        root / "train.jsonl",
        workdir,
        num_stages,
        world_size,
        overrides=(*DPO, "micro_batch_size=1", *overrides),
    )


@pytest.mark.parametrize(
    "layout, tied, overrides",
    [
        ("pp2", False, (SMOOTHED, CLIPPED)),
        ("pp2xdp2", True, (IPO, CHECKPOINTED)),
        pytest.param("pp1", False, (SMOOTHED, ROBUST, WITH_SFT), marks=pytest.mark.full),
        pytest.param("pp2", True, (HINGE, "dpo.beta=1", CHECKPOINTED), marks=pytest.mark.full),
        pytest.param("pp2xdp2", False, (SMOOTHED, ROBUST, WITH_SFT, CLIPPED), marks=pytest.mark.full),
        pytest.param("tp2", False, (WITH_SFT, CLIPPED), marks=pytest.mark.full),
        pytest.param("tp2", False, (SMOOTHED, CLIPPED), marks=pytest.mark.full),
        pytest.param("tp2xpp2", True, (IPO, CHECKPOINTED), marks=pytest.mark.full),
        pytest.param("cp2", False, (SMOOTHED, ROBUST, WITH_SFT, CLIPPED), marks=pytest.mark.full),
        pytest.param("cp2", True, (IPO, CHECKPOINTED), marks=pytest.mark.full),
        pytest.param("cp2", False, (RING, SMOOTHED, WITH_SFT, CLIPPED), marks=pytest.mark.full),
        pytest.param("cp2xpp2", True, (HINGE, "dpo.beta=1", CHECKPOINTED), marks=pytest.mark.full),
        *(
            pytest.param(layout, tied, overrides, marks=pytest.mark.full)
            for layout in LAYOUTS
            for tied, overrides in (
                (False, ()),
                (True, (SMOOTHED, CHECKPOINTED, "micro_batch_size=2")),
                (False, (IPO, CLIPPED, "data.pad_to=max_seq_length")),
            )
        ),
    ],
)
def test_five_sgd_steps_equal_the_paper(
    workers: Callable[[int], WorkerGroup],
    root: Path,
    tmp_path: Path,
    layout: str,
    tied: bool,
    overrides: tuple[str, ...],
) -> None:
    case = build_case(root, tmp_path, layout, *overrides, tied=tied)
    result = merge(workers(case.world_size).run(train_pairs, case))
    policy = load_model(case.model)
    oracle = train_oracle(case, NUM_PAIRS, policy, copy.deepcopy(policy))
    check_equal(result, oracle, first_metrics=1)
    assert worst_difference(result["weights"], oracle["weights"])[0] < BOUND
    assert max(result["losses"]) > 1.01 * min(result["losses"])  # it has moved


@pytest.mark.parametrize(
    "layout",
    ["pp2", *(pytest.param(layout, marks=pytest.mark.full) for layout in ("pp1", "pp4", "pp2xdp2", "tp2xpp2", "cp2"))],
)
def test_with_an_adapter_the_reference_is_the_model_without_it(
    workers: Callable[[int], WorkerGroup], root: Path, tmp_path: Path, layout: str
) -> None:
    """The adapter starts far from zero, so that policy and reference differ from the first step on."""
    policy = make_adapter(tmp_path / "adapter", root / "tiedFalse")
    case = build_case(root, tmp_path, layout, "adapter=lora", f"adapter.name_or_path={tmp_path}/adapter", CLIPPED)
    result = merge(workers(case.world_size).run(train_pairs, case))
    oracle = train_oracle(case, NUM_PAIRS, policy, load_model(case.model))
    check_equal(result, oracle)
    assert abs(result["losses"][0] - math.log(2)) > 0.01
    worst, name = worst_difference(*to_peft_weights(result, oracle, policy.config))
    assert worst < BOUND, name


@pytest.fixture
def run(workers: Callable[[int], WorkerGroup], root: Path, tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """run(name, layout, *overrides): the metrics of a whole run, which is evaluated on its own training pairs."""

    def start(name: str, layout: str, *overrides: str) -> list[dict[str, Any]]:
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
        case = build_case(root, tmp_path, layout, *defaults, *overrides)
        workers(case.world_size).run(train_run, case)
        return [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]

    return start


def find_references(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache").glob("*/reference-*"))


@pytest.mark.parametrize(
    "saved, resumed",
    [
        ("pp2", "pp1"),
        *(
            pytest.param(*pair, marks=pytest.mark.full)
            for pair in (("pp2xdp2", "pp2"), ("pp1", "pp2xdp2"), ("pp4", "pp2xdp2"), ("cp2", "pp2"), ("pp1", "cp2"))
        ),
    ],
)
def test_a_run_learns_and_continues_at_another_layout(
    run, root: Path, tmp_path: Path, saved: str, resumed: str
) -> None:
    """Also without the reference's log-probabilities, which are then computed again by the model that the run has
    started from."""
    whole = run("whole", saved)
    (file,) = find_references(tmp_path)
    reference, written = np.load(file), file.stat().st_mtime_ns
    run("begun", saved, "stop_after_steps=3")
    assert find_references(tmp_path) == [file] and file.stat().st_mtime_ns == written  # reused
    file.unlink()
    ended = run("ended", resumed, f"resume={tmp_path}/begun/checkpoints")
    assert find_references(tmp_path) == [file] and np.load(file) == pytest.approx(reference, rel=1e-6)

    steps = [[record for record in records if "loss" in record and record["step"] > 3] for records in (ended, whole)]
    assert [record["step"] for record in steps[0]] == [4, 5, 6]
    for found, expected in zip(*steps, strict=True):
        figures = ("loss", "grad_norm", *REWARDS)
        near = pytest.approx({name: expected[name] for name in figures}, rel=1e-4)  # Adam divides rounding by itself
        assert {name: found[name] for name in figures} == near

    first, last = whole[0], whole[-1]
    assert first["step"] == 0 and first["eval_loss"] == pytest.approx(math.log(2), rel=1e-5)
    assert (
        last["eval_rewards_accuracy"] > 0.9
        and last["eval_rewards_margin"] > 0.5 > abs(first["eval_rewards_margin"]) * 1e4
    )
    dataset = TokenizedDataset(file.parent, True, True)
    policy, reference = load_model(tmp_path / "ended" / "hf"), load_model(root / "tiedFalse")
    config = build_case(root, tmp_path, "pp1").config()
    expected = evaluate_oracle(config, NUM_PAIRS, dataset, policy, reference)
    assert {name: ended[-1][name] for name in expected} == pytest.approx(expected, rel=1e-4)


def test_another_loss_is_named_by_a_resume(run, tmp_path: Path) -> None:
    run("begun", "pp1", "stop_after_steps=1", "dpo.beta=0.1")
    with pytest.raises(AssertionError, match="dpo.beta was 0.1, is 0.2. Give the same"):
        run("other", "pp1", f"resume={tmp_path}/begun/checkpoints", "dpo.beta=0.2")


@pytest.mark.full
def test_other_weights_are_another_reference(run, root: Path, tmp_path: Path) -> None:
    """A file says by its name which model computed it: one that changes in place is noticed."""
    quick = ("max_steps=1", "eval_file=null", "eval_on_start=false")
    run("first", "pp1", *quick)
    model = tmp_path / "model"
    save_llama(model, seed=1)
    AutoTokenizer.from_pretrained(root / "tiedFalse").save_pretrained(model)
    for seed in (1, 2):
        save_llama(model, seed=seed)
        run(f"other{seed}", "pp1", *quick, f"model_name_or_path={model}")
    files = find_references(tmp_path)
    assert len(files) == 3 and len({np.load(file).tobytes() for file in files}) == 3


def test_a_reference_that_is_not_finite_is_refused(
    workers: Callable[[int], WorkerGroup], root: Path, tmp_path: Path
) -> None:
    model = save_llama(tmp_path / "model")
    model.lm_head.weight.data[7] = math.inf
    model.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(root / "tiedFalse").save_pretrained(tmp_path / "model")
    case = build_case(root, tmp_path, "pp1", f"model_name_or_path={tmp_path}/model")
    with pytest.raises(
        WorkerError,
        match="UserError: reference log-probabilities of train_file: that of the chosen answer of pair 0 "
        r"\(counted from 0\) is nan",
    ):
        workers(1).run(train_run, case)
    assert find_references(tmp_path) == []
