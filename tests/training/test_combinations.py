"""Every pair of values of two axes trains as the plain Hugging Face model does, or is refused by the table.

All pairs on a dense family and one with experts, every value on each of the others. `make test` runs every value once,
on the dense one and at most two ranks.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from support.combination_runs import HEADS, Material, check_row
from support.combinations import AXES, RANKS, SLOW, Refusals, Row, cover, list_combinations
from support.configs import build_config
from support.families import FAMILIES, has_sharding_plan
from support.workers import WorkerGroup
from transformers import AutoConfig

from errors import UserError
from models.architecture.lookup import choose_attention, find_sequence_obstacle
from models.experts.sizes import count_experts
from training.config.incompatible import list_conflicts, list_pairs

BATCH = ("micro_batch_size=2", "global_batch_size=8")
DENSE, EXPERTS = "llama", "deepseek_v3"
PLAINEST = {next(iter(values)) for values in AXES.values()} | AXES["layout"].keys()
UNSHARDED = {"tp2": "dp2", "tp2xpp2": "pp2xdp2"}  # the same ranks, for a model that tensor parallelism does not shard
UNDIVIDED = {"ep2": "dp2", "ep2xpp2": "pp2xdp2"}  # the same ranks, for a model without experts
LONG = SLOW | {
    ("layout", name) for name, ranks in RANKS.items() if ranks > 2 or name in UNDIVIDED
}  # left to the long suite


@cache
def refusals() -> Refusals:
    return Refusals(build_config(*BATCH))


def test_all_pairs_are_covered_or_refused_by_the_table() -> None:
    rows = cover(refusals(), 2)
    covered = {pair for row in rows for pair in list_combinations_of(row)}
    for pair in list_combinations(AXES, 2):
        assert (pair in covered) != (refusals().refuses(*pair) or has_no_place(pair)), pair
    assert rows == cover(Refusals(build_config(*BATCH)), 2)
    assert len(rows) < 85


def has_no_place(pair: tuple[tuple[str, str], ...]) -> bool:
    """Return whether an axis has no value that both allow, such as schedules for several stages and ZeRO-3 for one."""

    def is_refused(other: tuple[str, str]) -> bool:
        return any(refusals().refuses(each, other) for each in pair)

    others = AXES.keys() - {axis for axis, _ in pair}
    return any(all(is_refused((axis, value)) for value in AXES[axis]) for axis in others)


def list_combinations_of(row: Row) -> set[tuple[tuple[str, str], ...]]:
    values = list(row.items())
    return {(one, other) for number, one in enumerate(values) for other in values[number + 1 :]}


def test_the_checks_of_a_run_agree_with_the_rows() -> None:
    """A whole row passes the checks; a pair that no row has is refused by them, whatever else the run has."""
    assert not [row for row in cover(refusals(), 2) if list_conflicts(refusals().run(row))]
    for pair in list_combinations(AXES, 2):
        if refusals().refuses(*pair):
            assert list_conflicts(refusals().run(dict(pair))), pair


def test_a_refusal_that_the_table_lacks_would_run() -> None:

    fewer = Refusals(build_config(*BATCH), [pair for pair in list_pairs() if pair.first.words != "freeze"])
    assert refusals().refuses(("adapter", "lora"), ("freeze", "layer"))
    assert any(row["adapter"] == "lora" and row["freeze"] == "layer" for row in cover(fewer, 2))


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    return Material(tmp_path_factory.mktemp("combinations"))


def name_row(row: Row) -> str:
    """Return the layout, and the values that differ from the plainest."""
    changed = [axis if value in ("true", "on") else value for axis, value in row.items() if value not in PLAINEST]
    return "-".join([row["layout"], *changed])


def list_runs() -> list:
    """Return every value once, which is quick; all pairs; every value on the other families."""
    fast = [pytest.param(DENSE, row, id=f"{DENSE}-{name_row(row)}") for row in cover(refusals(), 1, LONG)]
    values, pairs = (cover(refusals(), strength) for strength in (1, 2))
    rows = {family: pairs if family in (DENSE, EXPERTS) else values for family in sorted(FAMILIES)}
    full = [
        pytest.param(family, row, id=f"{family}-{name_row(row)}", marks=pytest.mark.full)
        for family, chosen in rows.items()
        for row in chosen
    ]
    return fast + full


@pytest.mark.parametrize(("family", "row"), list_runs())
def test_a_row_trains_as_the_plain_model(
    workers: Callable[[int], WorkerGroup], material: Material, tmp_path: Path, family: str, row: Row
) -> None:
    if row["compile"] == "true" and shutil.which("g++") is None:
        pytest.skip("needs a C++ compiler")
    row = within(family, row)
    check_row(workers, material, family, row, tmp_path)


def within(family: str, row: Row) -> Row:
    """Return the row with a kernel that the family has (`ATTENTION_IMPLEMENTATIONS`), with replicas if its layers or
    sequences cannot be split, or it has no experts to divide, and with the LM head if `transformers` has no class of it
    with the other one."""
    config = AutoConfig.for_model(family)
    if row["objective"] in HEADS and type(config) not in HEADS[row["objective"]].classes:
        row = row | {"objective": "sft"}
    if "tp2" in row["layout"] and not has_sharding_plan(family):
        row = row | {"layout": UNSHARDED[row["layout"]]}
    if row["layout"] == "cp2" and find_sequence_obstacle(config):
        row = row | {"layout": "dp2"}
    if row["layout"] in UNDIVIDED and count_experts(config) == (1, 1):
        row = row | {"layout": UNDIVIDED[row["layout"]]}
    try:
        choose_attention(config, row["attention"])
    except UserError:
        return row | {"attention": "auto"}
    return row
