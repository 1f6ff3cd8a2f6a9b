"""Steps whose data are skipped: the other steps are those of a run without them, in one process and after a resume."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.cases import BOUND, Case, train_oracle, worst_difference
from support.runs import export_of, list_tokenized, read_metrics

from data.order import GlobalOrder
from training.inputs.skipped_data import is_skipped, iterate_trained


class Loader:
    def iterate(self, start: int, end: int) -> list[int]:
        assert start < end
        return list(range(start, end))


@pytest.mark.parametrize(
    "intervals", [[], [[1, 1]], [[4, 6]], [[9, 20], [2, 3]], [[2, 5], [4, 6], [7, 7]], [[1, 10]], [[30, 40]]]
)
@pytest.mark.parametrize(("start", "end"), [(0, 10), (4, 7), (2, 3)])
def test_the_loader_is_asked_for_what_is_left(intervals: list[list[int]], start: int, end: int) -> None:
    left = [step for step in range(start, end) if not is_skipped(step + 1, intervals)]
    assert list(iterate_trained(Loader(), start, end, intervals)) == left


SKIPPING = (
    "optimizer=sgd", "learning_rate=0.5", "lr_scheduler_type=constant", "warmup_ratio=0", "max_grad_norm=0",
    "max_steps=6", "skip_data_intervals=[[1,1],[3,4]]", "eval_file=null",
)  # fmt: skip


@pytest.mark.parametrize(
    ("num_stages", "world_size"),
    [(2, 2), pytest.param(4, 4, marks=pytest.mark.full), pytest.param(2, 4, marks=pytest.mark.full)],
    ids=["pp2", "pp4", "pp2xdp2"],
)
def test_the_weights_are_those_of_the_steps_that_are_left(
    run: Callable[..., Path], root: Path, num_stages: int, world_size: int
) -> None:
    out = run("skipped", num_stages, world_size, *SKIPPING)
    case = Case(root / "tiedFalse", root / "train.jsonl", root, steps=6, overrides=SKIPPING)
    oracle = train_oracle(case)
    assert worst_difference(export_of(out), oracle["weights"])[0] < BOUND
    lines = read_metrics(out)
    assert [line["step"] for line in lines] == [2, 5, 6]
    assert [line["loss"] for line in lines] == pytest.approx(oracle["losses"], rel=BOUND)
    data = next(data for data in list_tokenized(root) if len(data) == 40)
    assert lines[0]["num_tokens"] == sum(len(data.input_ids(i)) for i in GlobalOrder(40, 8, 42).sample_ids(1))


@pytest.mark.full
@pytest.mark.parametrize("stop", [1, 3, 4], ids=["before the first update", "within an interval", "after it"])
def test_a_resumed_run_skips_what_is_left_of_an_interval(run: Callable[..., Path], stop: int) -> None:
    adam = ("optimizer=adamw", "learning_rate=1e-2")
    whole = run("whole", 2, 2, *SKIPPING, *adam)
    run("parts", 2, 2, *SKIPPING, *adam, f"stop_after_steps={stop}")
    parts = run("parts", 2, 2, *SKIPPING, *adam, "resume=latest")
    for name, tensor in export_of(whole).items():
        assert torch.equal(export_of(parts)[name], tensor), name
    assert read_metrics(parts) == read_metrics(whole)
