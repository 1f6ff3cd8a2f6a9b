"""The end tokens that are added to a model's config files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from models.weights.vocabulary import add_end, add_eos_token_id


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
