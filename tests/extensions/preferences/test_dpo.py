"""Preference optimization through real pipeline stages against the paper's formulas on the plain Hugging Face model in
one process."""

from __future__ import annotations

import copy
import errno
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import objective_runs
from support.adapters import make_adapter, to_peft_weights
from support.cases import BOUND, CHECKPOINTED, CLIPPED, LAYOUTS, RING, Case, merge, train_run, worst_difference
from support.objective_runs import (
    NUM_SAMPLES,
    check_continued,
    check_equal,
    load_model,
    replace_model,
    save_material,
    start_runs,
    train_answers,
)
from support.pair_runs import REWARDS, evaluate_oracle, train_oracle
from support.tiny import save_llama
from support.workers import WorkerError, WorkerGroup
from transformers import AutoTokenizer

from data.storage.tokenized import TokenizedDataset

DPO = ("data=preference", "task=dpo", "dpo.beta=0.3")
SMOOTHED, IPO = "dpo.label_smoothing=0.2", "dpo.loss_type=ipo"
ROBUST, HINGE, WITH_SFT = "dpo.loss_type=robust", "dpo.loss_type=hinge", "dpo.sft_coef=0.5"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_material(tmp_path_factory.mktemp("dpo"))


def build_case(root: Path, workdir: Path, layout: str, *overrides: str, tied: bool = False) -> Case:
    if CLIPPED not in overrides:  # a pair's gradient is that of sums over tokens
        overrides = ("learning_rate=0.02", *overrides)
    given = (*DPO, "micro_batch_size=1", *overrides)
    return objective_runs.build_case(root, workdir, layout, *given, tied=tied, steps=5)


@pytest.mark.parametrize(
    "layout, tied, overrides",
    [
        pytest.param("pp2", False, (SMOOTHED, CLIPPED), marks=pytest.mark.full),
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
    compare_steps(workers, build_case(root, tmp_path, layout, *overrides, tied=tied))


def compare_steps(workers: Callable[[int], WorkerGroup], case: Case) -> None:
    result = merge(workers(case.world_size).run(train_answers, case))
    policy = load_model(case.model)
    oracle = train_oracle(case, policy, copy.deepcopy(policy))
    check_equal(result, oracle, first_metrics=1)
    assert worst_difference(result["weights"], oracle["weights"])[0] < BOUND
    assert max(result["losses"]) > 1.01 * min(result["losses"])  # it has moved


@pytest.mark.full
@pytest.mark.parametrize("layout", ["zero2", "pp2xdp2"])
def test_ranks_that_divide_experts(
    workers: Callable[[int], WorkerGroup], root: Path, tmp_path: Path, layout: str
) -> None:
    """The pass of the reference exchanges rows too."""
    case = build_case(root, tmp_path, layout, SMOOTHED, CLIPPED, "expert_parallel_size=2")
    compare_steps(workers, replace_model(case, tmp_path / "model"))


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
    result = merge(workers(case.world_size).run(train_answers, case))
    oracle = train_oracle(case, policy, load_model(case.model))
    check_equal(result, oracle)
    assert abs(result["losses"][0] - math.log(2)) > 0.01
    worst, name = worst_difference(*to_peft_weights(result, oracle, policy.config))
    assert worst < BOUND, name


@pytest.fixture
def run(workers: Callable[[int], WorkerGroup], root: Path, tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    return start_runs(workers, root, tmp_path, build_case)


def find_references(tmp_path: Path) -> list[Path]:
    """The columns of whole folders."""
    files = sorted((tmp_path / "cache").glob("*/reference-*/reference.bin"))
    return [file for file in files if not file.parent.suffix]


def load_reference(file: Path) -> np.ndarray:
    return np.fromfile(file, np.float64)


@pytest.mark.parametrize(
    "saved, resumed, stops",
    [
        ("pp2", "pp1", False),
        *(
            pytest.param(*pair, True, marks=pytest.mark.full)
            for pair in (("pp2xdp2", "pp2"), ("pp1", "pp2xdp2"), ("pp4", "pp2xdp2"), ("cp2", "pp2"), ("pp1", "cp2"))
        ),
    ],
)
def test_a_run_learns_and_continues_at_another_layout(
    run, root: Path, tmp_path: Path, saved: str, resumed: str, stops: bool
) -> None:
    """Also without the reference's log-probabilities, which are then computed again by the initial model. stops:
    continue a run that was stopped, else one from the middle of the whole run."""
    whole, begun = run("whole", saved, "save_steps=3"), "whole"
    (file,) = find_references(tmp_path)
    reference, written = load_reference(file), file.stat().st_mtime_ns
    if stops:
        run("begun", saved, "stop_after_steps=3")
        begun = "begun"
        assert find_references(tmp_path) == [file] and file.stat().st_mtime_ns == written  # reused
    shutil.rmtree(file.parent)
    ended = run("ended", resumed, f"resume={tmp_path}/{begun}/checkpoints/global_step3")
    assert find_references(tmp_path) == [file] and load_reference(file) == pytest.approx(reference, rel=1e-6)

    check_continued(whole, ended, ("loss", "grad_norm", *REWARDS))

    first, last = whole[0], whole[-1]
    assert first["step"] == 0 and first["eval_loss"] == pytest.approx(math.log(2), rel=1e-5)
    assert (
        last["eval_rewards_accuracy"] > 0.9
        and last["eval_rewards_margin"] > 0.5 > abs(first["eval_rewards_margin"]) * 1e4
    )
    dataset = TokenizedDataset(file.parents[1], True, True)
    policy, reference = load_model(tmp_path / "ended" / "hf"), load_model(root / "tiedFalse")
    config = build_case(root, tmp_path, "pp1").config()
    expected = evaluate_oracle(config, NUM_SAMPLES, dataset, policy, reference)
    assert {name: ended[-1][name] for name in expected} == pytest.approx(expected, rel=1e-4)


@pytest.mark.full
def test_another_loss_is_named_by_a_resume(run, tmp_path: Path) -> None:
    run("begun", "pp1", "stop_after_steps=1", "dpo.beta=0.1")
    with pytest.raises(AssertionError, match="dpo.beta was 0.1, is 0.2. Give the same"):
        run("other", "pp1", f"resume={tmp_path}/begun/checkpoints", "dpo.beta=0.2")


@pytest.mark.full
def test_other_weights_are_another_reference(run, root: Path, tmp_path: Path) -> None:
    """A file's name identifies the model that computed it: a model that changes in place is noticed."""
    quick = ("max_steps=1", "eval_file=null", "eval_on_start=false")
    run("first", "pp1", *quick)
    model = tmp_path / "model"
    save_llama(model, seed=1)
    AutoTokenizer.from_pretrained(root / "tiedFalse").save_pretrained(model)
    for seed in (1, 2):
        save_llama(model, seed=seed)
        run(f"other{seed}", "pp1", *quick, f"model_name_or_path={model}")
    files = find_references(tmp_path)
    assert len(files) == 3 and len({file.read_bytes() for file in files}) == 3


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


def train_on_a_full_disk(case: Case) -> None:
    from data.storage.scores import ScoresWriter
    from training.distributed import ranks

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    finish, seconds = ScoresWriter.finish, ranks.SECONDS_FOR_ANOTHER_TO_REPORT
    ScoresWriter.finish = refuse  # type: ignore[method-assign]
    ranks.SECONDS_FOR_ANOTHER_TO_REPORT = 1  # `workers` wait 5 for a rank once another has failed
    try:
        train_run(case)
    finally:
        ScoresWriter.finish = finish  # type: ignore[method-assign]
        ranks.SECONDS_FOR_ANOTHER_TO_REPORT = seconds


def test_where_a_rank_cannot_write_the_reference_all_ranks_end(
    workers: Callable[[int], WorkerGroup], root: Path, tmp_path: Path
) -> None:
    with pytest.raises(WorkerError) as raised:
        workers(2).run(train_on_a_full_disk, build_case(root, tmp_path, "pp2"))
    text = str(raised.value)
    assert "UserError: reference log-probabilities of train_file: " in text
    assert "cannot be written: No space left on device; make room" in text
    assert "SystemExit: 74" in text and "ended or hanging" not in text  # of the rank that had nothing to write
