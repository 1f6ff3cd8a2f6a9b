"""Keys of other trainers: each hint names keys that exist, as the importer translates them, and never a switch."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from extension import load_extensions
from extensions.import_config import hugging_face
from extensions.import_config.draft import Draft
from extensions.import_config.importer import PROJECTS
from training.config.foreign_keys import FOREIGN, SWITCHES, find_hint
from training.config.key_table import list_types
from training.config.schema import CONF

HINTS = FOREIGN | {key: hint for extension in load_extensions() for key, hint in extension.hints.items()}
OURS = {*list_types(), *(folder.name for folder in CONF.iterdir() if folder.is_dir())}
# One of them fits each rule.
VALUES = (
    True, 1, 0.5, 2, "x", "all", "lora", "cosine", "adamw_torch", "bf16", "wandb", "sdpa", "gaussian", "zero2", "dpo",
    ["x"], {"min_lr_rate": 0.1},
)  # fmt: skip
# axolotl's is a mapping with the token that ends a turn
OTHER_MEANING = {"special_tokens"}


def list_set(module: ModuleType, key: str) -> set[str]:
    """Returns the keys of ours that the rule for a key sets."""
    found: set[str] = set()
    for value in VALUES:
        draft = Draft({key: value})
        try:
            module.RULES[key](draft, key, value)
        except (TypeError, ValueError, AttributeError):
            continue  # no value of this key
        found |= {*draft.groups, *draft.keys}
    return found


def read_names(hint: str | None) -> set[str]:
    return {choice.partition("=")[0] for choice in (hint or "").split(" or ")}


@pytest.mark.parametrize("module", [hugging_face, *PROJECTS.values()], ids=lambda module: module.__name__)
def test_a_hint_says_what_the_importer_does(module: Any) -> None:
    for key in module.RULES.keys() - OURS - OTHER_MEANING:
        if ours := list_set(module, key):
            assert read_names(find_hint(key, list_types())) & ours, key


@pytest.mark.parametrize("key", HINTS)
def test_a_hint_names_keys_that_exist_for_one_that_does_not(key: str) -> None:
    assert key not in OURS and read_names(HINTS[key]) <= OURS - SWITCHES


def test_what_switches_a_check_off_is_never_a_hint() -> None:
    assert SWITCHES <= OURS
    for key in (*SWITCHES, *(f"{key}s" for key in SWITCHES), "gradient_checkpointing", "trust"):
        assert not read_names(find_hint(key, list_types())) & SWITCHES


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("gradient_checkpointing", "activation_checkpoint_interval=1"), ("resume_from_checkpoint", "resume"),
        ("lora_r", "adapter.r"), ("lora_rank", "adapter.r"), ("lr", "learning_rate"), ("bf16", "precision=bf16"),
        ("data.max_length", "max_seq_length"), ("learning_rte", "learning_rate"), ("xyzzy", None),
        ("dp", None), ("ep", "expert_parallel_size"), ("alpha", "adapter.lora_alpha"), ("total_steps", "max_steps"),
        ("log_every", "logging_steps"), ("gas", "gradient_accumulation_steps"),
    ],
)  # fmt: skip
def test_a_hint(key: str, hint: str | None) -> None:
    assert find_hint(key, list_types()) == hint
