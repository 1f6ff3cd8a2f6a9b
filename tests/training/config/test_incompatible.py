"""Features that do not go together: each pair is refused by name, with its reason and the way out; a page lists all."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.configs import build_config, set_keys
from support.refusals import list_examples

from errors import UserError
from training.config.incompatible import (
    CheckedConfig,
    Pair,
    Scope,
    check_together,
    list_conflicts,
    list_pairs,
    render_table,
)
from training.config.schema import RunConfig
from training.config.validate import check_config

PAGE = Path(__file__).resolve().parents[3] / "docs" / "configure.md"


@pytest.fixture(scope="module")
def base() -> RunConfig:
    return build_config()


@pytest.mark.parametrize("pair", list_pairs(), ids=lambda pair: f"{pair.first.words} + {pair.second.words}")
def test_a_pair(base: RunConfig, pair: Pair) -> None:
    for message, overrides in list_examples(pair):
        run = CheckedConfig(set_keys(base, *overrides), has_accelerator=pair.scope is not Scope.run)
        assert list_conflicts(run) == [pair]
        with pytest.raises(UserError) as caught:
            check_together(run)
        assert str(caught.value) == f"{message}{pair.reason}; {pair.instead}"


def test_the_checks_of_a_run_read_the_table(base: RunConfig) -> None:
    check_config(base, has_accelerator=False)
    check_config(set_keys(base, "precision=fp16"), has_accelerator=True)
    with pytest.raises(UserError, match="precision=fp16 does not go together with a machine without a GPU"):
        check_config(set_keys(base, "precision=fp16"), has_accelerator=False)


def test_one_feature_alone_is_not_refused(base: RunConfig) -> None:
    flash = set_keys(base, "attn_implementation=flash_attention_2", "data.packing=true")
    check_together(CheckedConfig(flash))
    for overrides in (
        ("tensor_parallel_size=2",),
        ("num_stages=2", "schedule=interleaved"),
        ("plan=search", "schedule=interleaved"),
    ):
        check_together(CheckedConfig(set_keys(base, *overrides), has_accelerator=False))


def test_the_page_shows_the_table() -> None:
    assert render_table() in PAGE.read_text(), (
        "write it there: python -c 'from training.config.incompatible import render_table; print(render_table())'"
    )
