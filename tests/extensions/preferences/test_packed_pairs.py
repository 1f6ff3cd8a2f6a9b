"""Pairs of answers in packed rows through real pipeline stages: losses, gradients and metrics are those of each answer
alone in the plain Hugging Face model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import objective_runs
from support.adapters import make_adapter, to_peft_weights
from support.cases import BOUND, CHECKPOINTED, CLIPPED, RING, Case, merge, worst_difference
from support.objective_runs import (
    NUM_SAMPLES,
    PACKED_LAYOUTS,
    check_continued,
    check_equal,
    check_resumed,
    find_dataset,
    load_model,
    replace_model,
    save_material,
    start_runs,
    train_answers,
)
from support.pair_runs import REWARDS, evaluate_oracle, train_oracle
from support.tiny import find_tokenized
from support.workers import WorkerGroup

from data.order import GlobalOrder
from data.storage.rows import Rows
from training.inputs.datasets import build_row_plan

PACKED = ("data.packing=true", "max_seq_length=512", "micro_batch_size=1", "global_batch_size=4")
TASKS = {
    "dpo": ("dpo.beta=0.3",),
    "ipo": ("dpo.beta=0.3", "dpo.loss_type=ipo", "dpo.sft_coef=0.5"),
    "orpo": ("task=orpo", "orpo.beta=0.7"),
    "simpo": ("task=simpo", "simpo.beta=1.5", "simpo.gamma=0.8"),
    "cpo": ("task=cpo", "cpo.beta=0.3", "cpo.alpha=0.6", "cpo.nll_reduction=sum", CLIPPED),
}
full = pytest.mark.full


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_material(tmp_path_factory.mktemp("packed_pairs"))


def build_case(root: Path, workdir: Path, layout: str, *overrides: str, tied: bool = False) -> Case:
    given = ("data=preference", "learning_rate=0.02", *PACKED, *overrides)
    return objective_runs.build_case(root, workdir, layout, *given, tied=tied)


def compare_steps(workers: Callable[[int], WorkerGroup], case: Case) -> None:
    result = merge(workers(case.world_size).run(train_answers, case))
    policy = load_model(case.model)
    reference = copy.deepcopy(policy) if case.config().task is None else None
    oracle = train_oracle(case, policy, reference)
    check_equal(result, oracle, first_metrics=1)
    assert worst_difference(result["weights"], oracle["weights"])[0] < BOUND
    assert max(result["losses"]) > 1.001 * min(result["losses"])  # it has moved
    counts = count_pairs(case)
    assert sum(counts) == NUM_SAMPLES and min(counts) < max(counts)


def count_pairs(case: Case) -> list[int]:
    """The pairs of each row."""
    config = case.config()
    rows = Rows(find_tokenized(case.workdir)[0], build_row_plan(config, "train_file"), False, False)
    return [len(rows.pieces(row)) // 2 for row in range(len(rows))]


@pytest.mark.parametrize(
    ("task", "layout", "tied", "overrides"),
    [
        ("dpo", "pp2", False, ()),
        ("orpo", "pp1", True, (CHECKPOINTED,)),
        *(
            pytest.param(task, layout, tied, overrides, marks=full)
            for task in TASKS
            for layout, tied, overrides in (
                ("pp1", False, ()),
                ("pp2", True, (CHECKPOINTED, "micro_batch_size=2")),
                ("pp2xdp2", False, ("data.pad_to=max_seq_length",)),
            )
        ),
        *(
            pytest.param(task, layout, False, overrides, marks=full)
            for task in TASKS
            for layout, overrides in PACKED_LAYOUTS
        ),
        pytest.param("dpo", "pp2", False, ("schedule=interleaved", "virtual_stages_per_rank=2"), marks=full),
        pytest.param("dpo", "pp2", False, ("attn_implementation=varlen",), marks=full),
        pytest.param("dpo", "pp2", False, ("dpo.loss_type=hinge",), marks=full),
        pytest.param("dpo", "pp2", False, ("dpo.loss_type=robust", "dpo.label_smoothing=0.2"), marks=full),
        *(pytest.param(task, "cp2", False, (), marks=full) for task in TASKS),
        pytest.param("cpo", "cp2", True, (RING,), marks=full),
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
    compare_steps(workers, build_case(root, tmp_path, layout, *TASKS[task], *overrides, tied=tied))


@full
@pytest.mark.parametrize(
    ("family", "task"),
    [("qwen3_next", "orpo"), ("qwen3_moe", "orpo"), ("falcon_h1", "dpo"), ("mamba2", "simpo"), ("lfm2", "cpo")],
)
def test_no_state_passes_from_an_answer_to_the_next(
    workers: Callable[[int], WorkerGroup], root: Path, tmp_path: Path, family: str, task: str
) -> None:
    """Linear attention, experts, state spaces next to attention and alone, short convolutions."""
    case = build_case(root, tmp_path, "pp2", *TASKS[task])
    compare_steps(workers, replace_model(case, tmp_path / "model", family))


@full
@pytest.mark.parametrize(
    ("task", "layout"), [("dpo", "pp1"), ("dpo", "pp2xdp2"), *((task, "pp2") for task in TASKS if task != "dpo")]
)
def test_with_an_adapter_the_reference_is_the_model_without_it(
    workers: Callable[[int], WorkerGroup], root: Path, tmp_path: Path, task: str, layout: str
) -> None:
    policy = make_adapter(tmp_path / "adapter", root / "tiedFalse")
    lora = ("adapter=lora", f"adapter.name_or_path={tmp_path}/adapter", CLIPPED)
    case = build_case(root, tmp_path, layout, *TASKS[task], *lora)
    result = merge(workers(case.world_size).run(train_answers, case))
    oracle = train_oracle(case, policy, load_model(case.model) if case.config().task is None else None)
    check_equal(result, oracle)
    worst, name = worst_difference(*to_peft_weights(result, oracle, policy.config))
    assert worst < BOUND, name


def count_step_pairs(case: Case, steps: int) -> list[int]:
    """Returns the pairs in the rows of each step."""
    pairs = count_pairs(case)
    order = GlobalOrder(len(pairs), case.config().global_batch_size, case.config().seed)
    return [sum(pairs[row] for row in order.sample_ids(step)) for step in range(steps)]


@pytest.fixture
def run(workers: Callable[[int], WorkerGroup], root: Path, tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    return start_runs(workers, root, tmp_path, build_case, *PACKED)


@pytest.mark.parametrize(("saved", "resumed"), [("pp2", "pp1"), pytest.param("pp2xdp2", "pp2", marks=full)])
def test_a_run_continues_at_another_layout_and_is_evaluated(
    run, root: Path, tmp_path: Path, saved: str, resumed: str
) -> None:
    """The reference's log-probabilities are those of the answers alone, which a run that is not packed finds."""
    whole = run("whole", saved, "save_steps=3")
    assert [line["samples_per_step"] for line in whole if "loss" in line] == count_step_pairs(
        build_case(root, tmp_path, "pp1"), steps=6
    )
    files = list((tmp_path / "cache").glob("*/reference-*/reference.bin"))
    ended = run("ended", resumed, f"resume={tmp_path}/whole/checkpoints/global_step3")
    check_continued(whole, ended, ("loss", "grad_norm", *REWARDS))
    config, dataset = build_case(root, tmp_path, "pp1").config(), find_dataset(tmp_path)
    expected = evaluate_oracle(
        config, NUM_SAMPLES, dataset, load_model(tmp_path / "ended" / "hf"), load_model(root / "tiedFalse")
    )
    assert {name: ended[-1][name] for name in expected} == pytest.approx(expected, rel=1e-4)
    alone = run("alone", resumed, "data.packing=false", "max_steps=1")
    assert "samples_per_step" not in alone[1]
    assert list((tmp_path / "cache").glob("*/reference-*/reference.bin")) == files
    assert alone[0]["eval_loss"] == pytest.approx(whole[0]["eval_loss"], rel=1e-6)


@full
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(("saved", "resumed"), [("pp2", "pp2"), ("pp2xdp2", "pp1")])
def test_each_objective_continues(run, tmp_path: Path, task: str, saved: str, resumed: str) -> None:
    check_resumed(run, tmp_path, (saved, resumed), *TASKS[task], metrics=REWARDS)
