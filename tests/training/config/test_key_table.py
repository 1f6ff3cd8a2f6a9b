"""docs/configure.md lists every key of a run as the schema and `conf/` have it."""

from __future__ import annotations

import runpy
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from support.configs import compose_config

from training.config.key_table import list_groups, list_keys, list_types, read_keys, render_keys, write_type
from training.config.schema import ParameterGroup, Precision, RunConfig

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "configure.md").read_text()


def test_the_page_shows_the_table() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "list_keys.py"))
    assert script["replace_table"](PAGE, render_keys()) == PAGE, "python scripts/list_keys.py writes it"


def test_conf_explains_every_key_of_the_schema_and_no_other() -> None:
    keys = list_keys()
    assert keys.keys() == list_types(RunConfig).keys()
    assert not [key for key in (*keys.values(), *list_groups().values()) if not key.comment]


def test_defaults_are_those_of_a_run() -> None:
    composed = compose_config("base")
    stated = {key.name: key.default for key in list_keys().values() if key.default not in ("", "???")}
    values = {name: OmegaConf.create(f"value: {default}").value for name, default in stated.items()}
    assert values == {name: as_written(OmegaConf.select(composed, name)) for name in stated}


def as_written(value: Any) -> Any:
    """A typed value as YAML has it."""
    return value.value if isinstance(value, Enum) else value


def test_comments_on_the_line_above_it_and_in_front_of_a_section() -> None:
    text = "# file\nfirst: 1\n\n# section. rest\n\n# above,\n# more\na: x # trailing\nb: # parent\n  c: '#d' # child\n"
    found = [(key.name, key.default, key.comment, key.section) for key in read_keys(text)]
    assert found == [
        ("first", "1", "file", ""),
        ("a", "x", "above, more trailing", "section. rest"),
        ("b", "", "parent", "section. rest"),
        ("b.c", "'#d'", "child", "section. rest"),
    ]


@pytest.mark.parametrize(
    ("hint", "words"),
    [
        (int | None, "int or null"),
        (Precision, "`fp32`, `bf16`, `fp16`"),
        (list[list[int]], "list of list of int"),
        (list[ParameterGroup], "list of `{pattern, learning_rate, weight_decay}`"),
        (Any, "any"),
        (ParameterGroup, ""),
    ],
)
def test_types_in_words(hint: Any, words: str) -> None:
    assert write_type(hint) == words
