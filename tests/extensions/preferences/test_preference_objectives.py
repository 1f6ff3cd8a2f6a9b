"""Preference objectives without a reference through real pipeline stages against their papers' formulas on the plain
Hugging Face model in one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import objective_runs
from support.adapters import make_adapter, to_peft_weights
from support.cases import BOUND, CHECKPOINTED, CLIPPED, LAYOUTS, ZERO_LAYOUTS, Case, merge, worst_difference
from support.objective_runs import (
    NUM_SAMPLES,
    check_continued,
    check_equal,
    find_dataset,
    load_model,
    save_material,
    start_runs,
    train_answers,
)
from support.pair_runs import FORMULAS, evaluate_oracle, train_oracle
from support.workers import WorkerError, WorkerGroup

TASKS = tuple(name for name in FORMULAS if name != "dpo")
# Each differs from its default
KEYS = {
    "orpo": ("orpo.beta=0.7",),
    "simpo": ("simpo.beta=1.5", "simpo.gamma=0.8"),
    "cpo": ("cpo.beta=0.3", "cpo.alpha=0.6"),
}
OTHER_KEYS = {
    "orpo": ("orpo.beta=2", CHECKPOINTED),
    "simpo": ("simpo.sft_coef=0.5", CHECKPOINTED),
    "cpo": ("cpo.nll_reduction=sum", CLIPPED),
}
full = pytest.mark.full


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_material(tmp_path_factory.mktemp("preference"))


def build_case(root: Path, workdir: Path, layout: str, *overrides: str, tied: bool = False) -> Case:
    """overrides: include the task."""
    given = ("data=preference", "micro_batch_size=1", "learning_rate=0.02", *overrides)
    return objective_runs.build_case(root, workdir, layout, *given, tied=tied)


@pytest.mark.parametrize(
    "task, layout, tied, overrides",
    [
        ("orpo", "pp2", False, KEYS["orpo"]),
        ("simpo", "pp1", True, (*KEYS["simpo"], "data.group_by_length=true")),
        ("cpo", "pp1", False, KEYS["cpo"]),
        *(
            pytest.param(task, layout, tied, overrides, marks=full)
            for task in TASKS
            for layout in LAYOUTS
            for tied, overrides in (
                (False, (*KEYS[task], CLIPPED)),
                (True, OTHER_KEYS[task]),
                (True, (*KEYS[task], "micro_batch_size=2", "data.pad_to=max_seq_length")),
            )
        ),
        *(pytest.param(task, layout, False, KEYS[task], marks=full) for task in TASKS for layout in ("tp2", "cp2")),
        *(
            pytest.param(task, layout, layout == "zero3", OTHER_KEYS[task], marks=full)
            for task in TASKS
            for layout in ZERO_LAYOUTS
        ),
        pytest.param("orpo", "tp2xpp2", True, OTHER_KEYS["orpo"], marks=full),
        pytest.param("cpo", "pp2xdp2", False, (*KEYS["cpo"], "data.group_by_length=true"), marks=full),
        pytest.param(
            "simpo", "pp2", False, ("schedule=interleaved", "virtual_stages_per_rank=2", *KEYS["simpo"]), marks=full
        ),
    ],
)
def test_three_sgd_steps_equal_the_paper(
    workers: Callable[[int], WorkerGroup],
    root: Path,
    tmp_path: Path,
    task: str,
    layout: str,
    tied: bool,
    overrides: tuple[str, ...],
) -> None:
    case = build_case(root, tmp_path, layout, f"task={task}", *overrides, tied=tied)
    result = merge(workers(case.world_size).run(train_answers, case))
    oracle = train_oracle(case, load_model(case.model))
    check_equal(result, oracle)
    assert worst_difference(result["weights"], oracle["weights"])[0] < BOUND
    assert max(result["losses"]) > 1.001 * min(result["losses"])  # it has moved


@pytest.mark.parametrize(
    "task, layout", [pytest.param(task, layout, marks=full) for task in TASKS for layout in ("pp2", "tp2xpp2", "zero3")]
)
def test_an_adapter_is_trained(
    workers: Callable[[int], WorkerGroup], root: Path, tmp_path: Path, task: str, layout: str
) -> None:
    policy = make_adapter(tmp_path / "adapter", root / "tiedFalse")
    keys = ("adapter=lora", f"adapter.name_or_path={tmp_path}/adapter", *KEYS[task])
    case = build_case(root, tmp_path, layout, f"task={task}", *keys)
    result = merge(workers(case.world_size).run(train_answers, case))
    oracle = train_oracle(case, policy)
    check_equal(result, oracle)
    worst, name = worst_difference(*to_peft_weights(result, oracle, policy.config))
    assert worst < BOUND, name


@pytest.fixture
def run(workers: Callable[[int], WorkerGroup], root: Path, tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    return start_runs(workers, root, tmp_path, build_case, "learning_rate=2e-3")


@pytest.mark.parametrize(
    "task, saved, resumed",
    [
        pytest.param("orpo", "pp2", "pp1", marks=full),
        pytest.param("simpo", "pp2xdp2", "pp2", marks=full),
        pytest.param("cpo", "pp1", "pp2xdp2", marks=full),
    ],
)
def test_a_run_learns_continues_and_is_evaluated(
    run, root: Path, tmp_path: Path, task: str, saved: str, resumed: str
) -> None:
    """No reference is computed, its metrics are in reports and evaluations, and a resume names another loss."""
    whole = run("whole", saved, f"task={task}")
    run("begun", saved, f"task={task}", "stop_after_steps=3")
    ended = run("ended", resumed, f"task={task}", f"resume={tmp_path}/begun/checkpoints")
    assert not list((tmp_path / "cache").glob("*/reference-*"))
    case = build_case(root, tmp_path, resumed, f"task={task}")
    policy, dataset = load_model(tmp_path / "ended" / "hf"), find_dataset(case.workdir)
    expected = evaluate_oracle(case.config(), NUM_SAMPLES, dataset, policy)
    figures = ("loss", "grad_norm", *(name.removeprefix("eval_") for name in expected if name != "eval_loss"))
    check_continued(whole, ended, figures)
    assert {name: ended[-1][name] for name in expected} == pytest.approx(expected, rel=1e-4)
    assert whole[-1]["eval_loss"] < whole[0]["eval_loss"]
    assert whole[-1]["eval_rewards_margin"] > whole[0]["eval_rewards_margin"]
    key = f"{task}.beta"
    with pytest.raises(WorkerError, match=f"{key} was .*, is 0.9. Give the same"):
        run("other", saved, f"task={task}", f"resume={tmp_path}/begun/checkpoints", f"{key}=0.9")
