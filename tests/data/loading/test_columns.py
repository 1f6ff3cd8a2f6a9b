"""Columns of a micro-batch: what fills them, and what a rank gets that has a part of each sequence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from batch import Column, Per, Side, Targets
from data.encoders.sft import SFTEncoder
from data.loading.columns import DOCUMENT_SUMS, ReadColumn, ReadRows
from data.loading.loader import LoaderOptions, build_eval_loader
from data.options import Packing
from data.storage.encoding import Encoding
from data.storage.rows import RowPlan, Rows, prepare_rows
from data.storage.tokenized import TokenizedDataset
from data.storage.tokenizing import prepare_dataset


@pytest.fixture(scope="module")
def path(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("columns")
    lines = [f'{{"prompt": "{number} legs", "completion": "{number} legs"}}' for number in range(3)]
    (folder / "a.jsonl").write_text("\n".join(lines))
    encoding = Encoding(SFTEncoder(), tokenizer, max_seq_length=64)
    return prepare_dataset([str(folder / "a.jsonl")], key="train_file", encoding=encoding, cache_dir=folder / "cache")


def place(rows: ReadRows) -> np.ndarray:
    return np.tile(np.arange(rows.whole.shape[1]), (len(rows.whole), 1))


def read(path: Path, column: Column, values: Any, **options: Any) -> list[tuple[Targets, torch.Tensor]]:
    """The column of each micro-batch of two rows; three rows leave one to fill."""
    loader = build_eval_loader(
        path,
        LoaderOptions(
            True, True, 0, 1, micro_batch_size=2, row_plan=RowPlan(64), pad_token_id=0,
            columns=(ReadColumn(column, values),), **options,
        ),
        3,
    )  # fmt: skip
    read_by = "inputs" if column.side is Side.first_stage else "targets"
    return [(batch.targets, getattr(batch, read_by).columns[column.name]) for batch in loader.iterate()]


@pytest.mark.parametrize("side", Side)
def test_a_row_that_fills_the_micro_batch_has_the_padding(path: Path, side: Side) -> None:
    column = Column("score", torch.float32, Per.row, side=side, padding=-1)
    found = [tensor for _, tensor in read(path, column, lambda rows: 10.0 + rows.ids)]
    assert [tensor.tolist() for tensor in found] == [[10, 11], [12, -1]] and found[0].dtype == torch.float32


def test_a_rank_gets_its_part_of_positions(path: Path) -> None:
    """The rank has the first and the last of four chunks."""
    column = Column("place", torch.int32, Per.position)
    for targets, found in read(path, column, place, chunks=(0, 3), num_chunks=4):
        width = targets.ids.shape[1] // 2
        assert found.shape == targets.ids.shape
        assert found[0].tolist() == [*range(width), *range(3 * width, 4 * width)]


def test_targets_are_numbered_over_the_folder(path: Path) -> None:
    column = Column("number", torch.int64, Per.target)
    found = [tensor for _, tensor in read(path, column, ReadRows.number_targets)]
    assert torch.cat(found).tolist() == list(range(sum(map(len, found)))) and len(found[1])


@pytest.mark.parametrize("chunks", [(0,), (0, 3)], ids=["whole", "a part"])
def test_targets_have_the_document_that_they_are_in(path: Path, chunks: tuple[int, ...]) -> None:
    """Packed into two rows, of which one has two documents; of a part of each row its own targets alone."""
    lengths = TokenizedDataset(path, False, False).lengths
    plan = RowPlan(-(-int(np.sort(lengths)[1:].sum()) // 8) * 8, Packing.BEST_FIT)
    prepare_rows(path, plan, "train_file", None)
    rows = Rows(path, plan, True, True)
    options = LoaderOptions(
        True, True, 0, 1, micro_batch_size=3, row_plan=plan, pad_token_id=0, columns=DOCUMENT_SUMS, chunks=chunks,
        num_chunks=4 if len(chunks) > 1 else 1,
    )  # fmt: skip
    (batch,) = build_eval_loader(path, options, len(rows)).iterate()
    assert sorted(len(rows.pieces(row)) for row in range(len(rows))) == [1, 2]
    samples = rows.list_samples(np.arange(len(rows)))
    targets = TokenizedDataset(path, False, False).num_targets[samples]
    assert batch.targets.columns["num_targets"].tolist() == targets.tolist()
    segments = batch.inputs.segment_ids  # [B, W], of whole rows
    width = segments.shape[1] // options.num_chunks
    own = torch.cat([segments[:, chunk * width : (chunk + 1) * width] for chunk in chunks], dim=1)
    before = torch.tensor([0, *np.cumsum([len(rows.pieces(row)) for row in range(len(rows))]).tolist()])[:3, None]
    documents = (own - 1 + before).flatten()[batch.targets.indices]
    assert batch.targets.columns["target_documents"].tolist() == documents.tolist() and len(documents)


def test_a_value_of_the_micro_batch_is_a_scalar(path: Path) -> None:
    column = Column("rows", torch.int64, Per.batch)
    found = [tensor for _, tensor in read(path, column, lambda rows: np.array(len(rows.ids)))]
    assert [tensor.item() for tensor in found] == [2, 1] and found[0].shape == ()
