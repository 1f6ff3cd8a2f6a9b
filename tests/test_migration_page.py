"""docs/migration.md names keys that exist: what its right columns show in code is a key, or a key and its value."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from training.config.schema import RunConfig
from training.objectives.registry import OBJECTIVES

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "migration.md"
# Code in a right column that is no key: commands, files, metrics, and what the text says of the other trainer.
OTHERS = re.compile(
    r".*\.py\b.*|--.*|hf/|.*\.json|deepspeed .*|\.\.\./.*|messages|eval_\w+_loss|eval_token_accuracy"
    r"|null|best|orpo|simpo|stage\d|disable_p2p_cache_shape|epochs: 0.1|\+deepspeed.*|bf16"
    r"|offload_optimizer: \{.*|hf:NAME|\{_target_.*"
)
# What the page says already, and is not there yet. Take out what is.
COMING = {
    *(f"task={name}" for name in ("kto",)),
}  # fmt: skip


def list_named(page: str) -> Iterator[str]:
    """The code of the right columns; of a row that says "the same", that of the left one."""
    for line in page.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == 2 and set(cells[0]) != {"-"} and cells != ["there", "here"]:
            yield from re.findall(r"`([^`]+)`", cells[0] if cells[1].startswith("the same") else cells[1])


def find_wrong(named: str) -> str | None:
    """What is wrong with a key, `key=value` or `key: value`; None when nothing is."""
    match = re.fullmatch(r"([\w.]+)(?:[=:](.*))?", named)
    if match is None:
        return "that is no key"
    key, value = match[1], (match[2] or "").strip()
    hint: Any = RunConfig
    for name in key.split("."):
        hint = get_type_hints(hint).get(name) if is_dataclass(hint) else None
        if hint is None:
            return f"there is no key {key}"
    kinds = [kind for kind in (hint, *get_args(hint)) if isinstance(kind, type)]
    enum = next((kind for kind in kinds if issubclass(kind, Enum)), None)
    if not re.fullmatch(r"[a-z]\w*", value) or value == "null":
        return None
    if enum is not None:
        return None if value in {member.value for member in enum} else f"{key} has no value {value}"
    if is_dataclass(hint):
        return None if (ROOT / "conf" / key / f"{value}.yaml").is_file() else f"there is no {key}={value}"
    return f"there is no task {value}" if key == "task" and value not in OBJECTIVES else None


NAMED = sorted({named for named in list_named(PAGE.read_text()) if not OTHERS.fullmatch(named)})


def test_the_page_names_keys_that_are_there() -> None:
    assert len(NAMED) > 80
    wrong = {named: reason for named in NAMED if (reason := find_wrong(named)) and named not in COMING}
    assert not wrong, wrong


def test_what_is_still_to_come_is_not_there() -> None:
    assert not [named for named in COMING if find_wrong(named) is None], "it has come: take it out of COMING"
    assert set(NAMED) >= COMING


@pytest.mark.parametrize(
    ("named", "reason"),
    [
        ("keep_lasst", "there is no key keep_lasst"),
        ("data.packng=true", "there is no key data.packng"),
        ("precision=fp8", "precision has no value fp8"),
        ("data=quiz", "there is no data=quiz"),
        ("task=ppo", "there is no task ppo"),
        ("max_steps: null", None),
        ("train_file=[{path: ..., weight: ...}, ...]", None),
    ],
)
def test_a_wrong_one_is_found(named: str, reason: str | None) -> None:
    assert find_wrong(named) == reason
    assert list(list_named(f"| there | here |\n|---|---|\n| `x` | `{named}` |\n| `a`, `b` | the same |\n")) == [
        named,
        "a",
        "b",
    ]
