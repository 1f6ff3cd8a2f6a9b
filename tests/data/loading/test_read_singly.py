"""Samples that a reference scores one by one, whatever the rows of the training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from data.encoders.sft import SFTEncoder
from data.loading.loader import LoaderOptions, ScoringLoader, read_singly
from data.options import Packing, PadTo
from data.storage.encoding import Encoding
from data.storage.rows import RowPlan, prepare_rows
from data.storage.tokenizing import prepare_dataset

LONGEST = 256  # max_seq_length


@pytest.fixture(scope="module")
def path(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("singly")
    lines = [f'{{"prompt": "{number} legs", "completion": "{number} legs"}}' for number in range(24)]
    (folder / "a.jsonl").write_text("\n".join(lines))
    encoding = Encoding(SFTEncoder(), tokenizer, max_seq_length=LONGEST)
    return prepare_dataset([str(folder / "a.jsonl")], key="train_file", encoding=encoding, cache_dir=folder / "cache")


@pytest.mark.parametrize("pad_to", PadTo)
@pytest.mark.parametrize("packing", [Packing.NONE, Packing.BEST_FIT])
def test_micro_batches_have_no_more_tokens_than_those_of_training(path: Path, packing: Packing, pad_to: PadTo) -> None:
    """A packed row has many samples; padded to its length, each would take as much memory as all of them."""
    plan = RowPlan(LONGEST, packing, group_size=2)
    prepare_rows(path, plan, "train_file", None)
    options = LoaderOptions(True, True, 0, 1, micro_batch_size=2, row_plan=plan, pad_token_id=0, pad_to=pad_to)
    singly = read_singly(options, path)
    loader = ScoringLoader(path, replace(singly, columns=()), micro_batches=1)
    batches, (rows, *_) = loader.chunk(0)
    shape = next(batches).inputs.input_ids.shape
    assert shape.numel() <= 2 * plan.rows_per_group * LONGEST and len(rows) >= 4
    if packing is Packing.BEST_FIT:
        assert shape.numel() > LONGEST  # nor far fewer
