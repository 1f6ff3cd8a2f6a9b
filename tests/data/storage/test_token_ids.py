"""Token ids without a row of the embedding, found before training."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from data.options import LengthPolicy
from data.storage.encoding import Encoding
from data.storage.tokenizing import prepare_dataset
from errors import UserError
from training.inputs.datasets import check_ids


@dataclass(frozen=True)
class OwnEncoder:
    """Makes two tokens of a record, the second of the id that it has."""

    def encode(self, record: dict, location: str, tokenizer: Any) -> dict[str, list[int]]:
        return {"input_ids": [1, record["id"]], "labels": [1, record["id"]]}


@pytest.mark.parametrize("token_id", [7, -1])
def test_file_sample_and_id_are_named(token_id: int, tokenizer, tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("one.jsonl", "two.jsonl")]
    for file, last in zip(files, (6, token_id), strict=True):
        file.write_text("".join(json.dumps({"id": number}) + "\n" for number in (3, 4, last)))
    encoding = Encoding(OwnEncoder(), tokenizer, 8, LengthPolicy.split)
    path = prepare_dataset(
        list(map(str, files)), key="train_file", encoding=encoding, cache_dir=str(tmp_path / "cache"), num_proc=1
    )
    config: Any = SimpleNamespace(data=SimpleNamespace(encoder={"_target_": "OwnEncoder"}))
    with pytest.raises(
        UserError,
        match=rf"^train_file: {files[1]}: sample 2 \(counted from 0\), from its line or record 3, has the token id "
        f"{token_id}, and the embedding has 7 rows; give the tokenizer of this model, or correct data.encoder",
    ):
        check_ids(config, tokenizer, {"train_file": path}, 7)


def test_ids_of_a_tokenizer_that_fits_are_not_read(tokenizer, tmp_path: Path) -> None:
    config: Any = SimpleNamespace(data=SimpleNamespace(encoder=None))
    rows = max(tokenizer.get_vocab().values()) + 1
    check_ids(config, tokenizer, {"train_file": tmp_path / "nowhere"}, rows)
    with pytest.raises(FileNotFoundError):
        check_ids(config, tokenizer, {"train_file": tmp_path / "nowhere"}, rows - 1)
