"""All state of every trained parameter is saved, or nothing is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cases import Case, build_engine
from support.tiny import save_llama, save_records, save_tokenizer
from support.workers import WorkerGroup

from errors import UserError
from training.checkpoint.coverage import Coverage, find_gap
from training.checkpoint.optimizer_state import load_state
from training.checkpoint.share import plan_share, plan_whole_share
from training.checkpoint.writer import write_share

TRAINED = {"a": 10, "b[8:0+4]": 6}
FIRST = {"weight/a@0": 4, "exp_avg/a@0": 4, "scalar/step@0": 1}
SECOND = {
    "weight/a@4": 6, "exp_avg/a@4": 6, "weight/b[8:0+4]@0": 6, "exp_avg/b[8:0+4]@0": 6, "scalar/step@0": 1,
}  # fmt: skip


def gap_of(*saved: dict[str, int]) -> str | None:
    return find_gap([Coverage(TRAINED, fragments) for fragments in saved])


def test_fragments_of_several_ranks_cover_a_parameter() -> None:
    assert gap_of(FIRST, SECOND) is None and gap_of(SECOND, FIRST) is None
    weights = [{key: count for key, count in rank.items() if key.startswith("weight")} for rank in (FIRST, SECOND)]
    assert gap_of(*weights) is None, "before the first step there is nothing but weights"


@pytest.mark.parametrize(
    "first, second, gap",
    [
        ({}, {}, "no rank holds elements 0 to 9 of the optimizer's weight of 'a'"),
        ({}, SECOND, "no rank holds elements 0 to 3 of the optimizer's weight of 'a'"),
        (FIRST, {**SECOND, "exp_avg/a@4": 5}, "no rank holds elements 9 to 9 of the optimizer's exp_avg of 'a'"),
        (SECOND, SECOND | FIRST, "several ranks hold elements 4 to 9 of the optimizer's weight of 'a'"),
        (FIRST | {"weight/a@0": 5}, SECOND, "several ranks hold elements 4 to 4 of the optimizer's weight of 'a'"),
        ({"weight/a@0": 4}, SECOND, "no rank holds elements 0 to 3 of the optimizer's exp_avg of 'a'"),
    ],
)
def test_what_is_missing_or_there_twice_is_named(first: dict[str, int], second: dict[str, int], gap: str) -> None:
    assert gap_of(first, second) == gap


def test_a_rank_that_trains_and_saves_nothing_does_not_hide_it() -> None:
    ranks = [Coverage({}, {}), Coverage(TRAINED, FIRST | SECOND), Coverage({"c": 2}, {})]
    assert find_gap(ranks) == "no rank holds elements 0 to 1 of the optimizer's weight of 'c'"


def test_a_save_of_a_real_engine_is_whole_or_fails(workers: Callable[[int], WorkerGroup], tmp_path: Path) -> None:
    save_llama(tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    save_records(tmp_path / "train.jsonl", 20)
    case = Case(tmp_path / "model", tmp_path / "train.jsonl", tmp_path, steps=2, overrides=("optimizer=adamw",))
    errors = workers(1).run(break_state, case, tmp_path)[0]
    name = r"'model.layers.0.self_attn.q_proj.weight'"
    assert errors["whole"] is None
    assert f"no rank holds elements 0 to 2303 of the optimizer's exp_avg of {name}, so step 1" in errors["mapping"]
    assert "keeps exp_avg (elementwise), exp_avg_sq (elementwise), more (of shape [3]), step (scalar)" in errors["more"]
    assert "keeps exp_avg_sq (elementwise), step (scalar), but a checkpoint saves exp_avg" in errors["less"]
    assert "the optimizer needs exp_avg, exp_avg_sq, step, and" in errors["resumed"]
    assert "holds exp_avg_sq, step; it is of another version" in errors["resumed"]
    assert "_hp_mapping" in errors["renamed"]


def break_state(case: Case, folder: Path) -> dict[str, str | None]:
    """Return the errors of a save or a resume, for state that is broken in one way after the other."""

    engine, loader, *_ = build_engine(case)
    engine.train_step(loader.iterate(0, 2), 0, 2)
    errors = {"whole": describe_error(plan_whole_share, engine, 1, None)}
    parameter = engine.module.get_parameter("1.self_attn.q_proj.weight")
    mapping, parameter._hp_mapping = parameter._hp_mapping, None
    errors["mapping"] = describe_error(plan_whole_share, engine, 1, None)
    del parameter._hp_mapping
    errors["renamed"] = describe_error(plan_share, engine)
    parameter._hp_mapping = mapping

    state: Any = engine.list_partitions()[0].state
    state["more"] = torch.zeros(3)
    errors["more"] = describe_error(plan_whole_share, engine, 1, None)
    del state["more"]

    files = [file for file in plan_share(engine) if file.is_optimizer_state]
    for file in files:
        for key in [key for key in file.tensors if key.startswith("exp_avg/")]:
            del file.tensors[key]
    write_share(folder, files, writes_engine_state=False)
    errors["resumed"] = describe_error(load_state, engine, folder)
    del state["exp_avg"]
    errors["less"] = describe_error(plan_whole_share, engine, 1, None)
    return errors


def describe_error(function: Callable[..., Any], *arguments: Any) -> str | None:
    try:
        function(*arguments)
    except (UserError, AttributeError) as error:
        return str(error)
    return None
