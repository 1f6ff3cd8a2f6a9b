"""Tokenizers that cannot be read, and the end tokens that are added to a model's config files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support.configs import build_config
from support.tiny import save_tokenizer

from errors import UserError
from models.weights.vocabulary import add_end, add_eos_token_id
from training.inputs.datasets import load_extended


@pytest.mark.parametrize(
    "ids, token_id, ends",
    [(None, None, None), (None, 7, 7), (7, 7, 7), (1, 7, [1, 7]), ([1, 7], 7, [1, 7]), ([1], 7, [1, 7]), (1, None, 1)],
)
def test_an_end_token_is_added_once(
    ids: int | list[int] | None, token_id: int | None, ends: int | list[int] | None
) -> None:
    assert add_end(ids, token_id) == ends


def test_a_file_is_written_only_where_something_is_new(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    add_eos_token_id(file, 7)
    assert not file.exists()
    file.write_text('{"eos_token_id":1,"x":2}')
    add_eos_token_id(file, 1)
    assert file.read_text() == '{"eos_token_id":1,"x":2}'
    add_eos_token_id(file, 7)
    assert json.loads(file.read_text()) == {"eos_token_id": [1, 7], "x": 2}


def truncate(file: Path) -> None:
    file.write_text(file.read_text()[:1000])


def rewrite(text: str) -> Callable[[Path], None]:
    return lambda file: file.write_text(text) and None


@pytest.mark.parametrize(
    "name, damage, message",
    [
        ("tokenizer.json", truncate, "{file} is not valid JSON (line 54: "),
        ("tokenizer.json", rewrite(""), "{file} is not valid JSON (line 1: "),
        ("tokenizer.json", rewrite("[]"), "{file} holds a JSON list instead of an object"),
        ("tokenizer.json", rewrite("{}"), "{file}: the tokenizer cannot be read ('added_tokens'); fetch its files"),
        ("tokenizer_config.json", rewrite("{"), "{file} is not valid JSON (line 1: "),
        ("tokenizer.json", Path.unlink, "no tokenizer in {file.parent} (Couldn't instantiate the backend"),
    ],
)
def test_a_malformed_tokenizer_is_one_line_that_names_the_file(
    name: str, damage: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    save_tokenizer(tmp_path)
    file = tmp_path / name
    damage(file)
    with pytest.raises(UserError) as caught:
        load_extended(build_config(f"tokenizer_name_or_path={tmp_path}"), "elsewhere")
    assert str(caught.value).startswith(message.format(file=file)) and "\n" not in str(caught.value)
