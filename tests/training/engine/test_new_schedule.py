"""Adding a schedule takes one class and one line in a table. Here GPipe (1811.06965) is trained, simulated, planned and
drawn."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.cases import BOUND, CLIPPED, Case, merge, train_case, train_oracle, worst_difference
from support.nccl_player import play
from support.planned import plan_config, search_config
from support.rank_programs import record
from support.tiny import save_llama, save_records, save_tokenizer

from training.costs.simulation import simulate
from training.pipeline.schedule import OneForwardOneBackward, Schedule, Unit, UnitKind
from training.pipeline.schedules import SCHEDULES
from training.plan_command.run import plan_run

MICRO_BATCHES = 4


class GPipe(Schedule):
    """All forward passes, then all backward passes."""

    def list_units(self, stage_id: int) -> list[Unit]:
        forward = self.list_forward(stage_id)
        return [*forward, *(unit._replace(kind=UnitKind.backward) for unit in forward)]


@pytest.fixture
def case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    """Two stages, four micro-batches of two samples."""
    monkeypatch.setitem(SCHEDULES, "gpipe", GPipe)
    save_llama(tmp_path / "hf", tied=True)
    save_tokenizer(tmp_path / "hf")
    save_records(tmp_path / "train.jsonl", 40)
    overrides = ("schedule=gpipe", CLIPPED, "hardware=a100_80g")
    return Case(tmp_path / "hf", tmp_path / "train.jsonl", tmp_path, 2, 2, steps=3, overrides=overrides)


def train_with_gpipe(case: Case) -> tuple[dict[str, Any], list[int]]:
    """On a rank, whose process has a table of its own: the result, and the stage of each list of units that was
    requested."""
    asked = []

    class WatchedGPipe(GPipe):
        def list_units(self, stage_id: int) -> list[Unit]:
            asked.append(stage_id)
            return super().list_units(stage_id)

    SCHEDULES["gpipe"] = WatchedGPipe
    try:
        return train_case(case), asked
    finally:
        del SCHEDULES["gpipe"]


def test_it_trains_to_the_gradients_of_hugging_face(workers, case: Case) -> None:
    results, asked = zip(*workers(2).run(train_with_gpipe, case))
    assert all(set(stages) == {0, 1} for stages in asked)  # its units, and when others send to it
    result, oracle = merge(list(results)), train_oracle(case)
    assert worst_difference(result["weights"], oracle["weights"])[0] < BOUND
    for figure in ("losses", "norms"):
        assert result[figure] == pytest.approx(oracle[figure], rel=BOUND)


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_no_rank_waits_forever(num_stages: int) -> None:
    for micro_batches in range(1, 9):
        for num_evaluated in (0, micro_batches):
            assert not any(play(record(GPipe(num_stages, micro_batches), num_evaluated), blocking=True))


def test_it_is_simulated() -> None:
    """As long as 1F1B where stages are even, with all of its forward passes first."""
    passes = simulate(GPipe(2, 4), [1.0, 1.0], [2.0, 2.0], [0.0])
    assert max(p.stop for p in passes) == (MICRO_BATCHES + 1) * 3
    assert GPipe(2, 4).bubble_share == pytest.approx(3 / 15)
    assert max(p.stop for p in passes if p.kind is UnitKind.forward) == 5
    assert min(p.start for p in passes if p.kind is UnitKind.backward) == 5


def test_it_is_planned_and_drawn(case: Case) -> None:
    config = replace(case.config(), world_size=2, plan=True)
    found, plain = plan_config(config), plan_config(replace(config, schedule="1f1b"))
    assert isinstance(found.schedule, GPipe) and isinstance(plain.schedule, OneForwardOneBackward)
    held = [[stage.memory.activations for stage in each.stages] for each in (found, plain)]
    assert held[0] == [held[1][0] * MICRO_BATCHES // 2, held[1][1] * MICRO_BATCHES]  # all of them, not P - stage_id
    assert found.passes != plain.passes and found.pipeline_seconds == pytest.approx(plain.pipeline_seconds, rel=0.1)
    text = "\n".join(plan_run(config))
    assert "bubble 20.0% = (P-1)/(M+P-1)" in text
    assert (case.workdir / "out" / "schedule.png").stat().st_size > 10_000


def test_the_search_tries_it_next_to_1f1b(case: Case) -> None:
    config = replace(case.config(), world_size=2, plan="search")
    found = search_config(config, most=10**6)
    tried = {(candidate.plan.layout.num_stages, candidate.plan.layout.schedule) for candidate in found}
    assert {(1, "1f1b"), (2, "1f1b"), (2, "gpipe")} <= tried and (1, "gpipe") not in tried
    for candidate in found:  # what differs from the config is said
        schedule = candidate.plan.layout.schedule
        assert (f"schedule={schedule}" in candidate.overrides) == (schedule != config.schedule)
