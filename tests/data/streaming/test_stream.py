"""Streams of rows: a function of seed and shards, whatever reads them; a cursor finds any row again."""

import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from data.encoders.sft import SFTEncoder
from data.options import LengthPolicy, OnBadRecord, Packing
from data.storage.encoding import Encoding
from data.storage.rows import RowPlan, Rows, prepare_rows
from data.storage.tokenizing import prepare_dataset
from data.streaming.blocks import Cursor, RecordBlock
from data.streaming.row_block import RowBlock, join_rows
from data.streaming.shards import list_shards
from data.streaming.stream import RowStream, StreamPlan
from errors import UserError

Row = tuple[tuple[int, ...], ...]
LENGTH = 40
NUM_RECORDS = 46
PLANS = {
    "singly": RowPlan(LENGTH),
    "best_fit": RowPlan(LENGTH, Packing.BEST_FIT),
    "concatenate": RowPlan(LENGTH, Packing.CONCATENATE),
}


def make_records(first: int, count: int) -> list[dict[str, str]]:
    """Records that all differ, with lengths that differ much."""
    return [
        {"prompt": f"{n}" + " legs" * (3 * (n % 7)), "completion": "Paris " * (1 + n % 4)}
        for n in range(first, first + count)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of unequal sizes in several formats, one of them empty."""
    folder = tmp_path_factory.mktemp("shards")
    lines = lambda records: "".join(json.dumps(record) + "\n" for record in records)  # noqa: E731
    (folder / "a.jsonl").write_text("\n" + lines(make_records(0, 13)))
    with gzip.open(folder / "b.jsonl.gz", "wt") as file:
        file.write(lines(make_records(13, 5)))
    table = pyarrow.Table.from_pylist(make_records(18, 20))
    parquet.write_table(table, folder / "c.parquet", row_group_size=6)
    (folder / "d.jsonl").write_text("")
    (folder / "e.json").write_text(json.dumps(make_records(38, 8)))
    return folder


@pytest.fixture
def build_plan(folder: Path, tokenizer) -> Callable[..., StreamPlan]:
    def build(rows: str = "singly", files: str | None = None, **changes: Any) -> StreamPlan:
        encoder = SFTEncoder()
        keeps_whole = PLANS[rows].packing is Packing.CONCATENATE
        encoding = Encoding(encoder, tokenizer, None if keeps_whole else LENGTH, LengthPolicy.split)
        encoding = replace(encoding, **{name: changes.pop(name) for name in ("on_bad_record",) if name in changes})
        shards = tuple(list_shards([files or str(folder / "*")], "train_file"))
        plan = StreamPlan(shards, encoding, PLANS[rows], seed=3, block_records=9)
        return replace(plan, **changes)

    return build


def list_rows(rows: RowBlock | Rows, count: int | None = None) -> list[Row]:
    reads = (rows.input_ids, rows.labels, rows.position_ids, rows.segment_ids)
    return [tuple(tuple(read(row).tolist()) for read in reads) for row in range(len(rows) if count is None else count)]


@pytest.mark.parametrize("rows", PLANS)
def test_the_rows_of_a_block_are_those_of_a_tokenized_folder(
    rows: str, build_plan, folder: Path, tmp_path: Path
) -> None:
    """The whole corpus is one block; so one pass has the rows that are cached without streaming, in another order."""
    plan = build_plan(rows, str(folder / "a.jsonl"), block_records=1000)
    path = prepare_dataset(
        [str(folder / "a.jsonl")], key="train_file", encoding=plan.encoding, cache_dir=tmp_path, log=None
    )
    prepare_rows(path, plan.row_plan, "train_file", None)
    cached = Rows(path, plan.row_plan, True, True)
    stream = RowStream(plan, Cursor())
    taken, again = stream.take(len(cached)), stream.take(len(cached))
    assert sorted(list_rows(taken)) == sorted(list_rows(cached)) and list_rows(taken) != list_rows(cached)
    assert sorted(list_rows(again)) == sorted(list_rows(cached)) and list_rows(again) != list_rows(taken)
    ids = np.arange(len(cached))
    order = [list_rows(cached).index(row) for row in list_rows(taken)]
    assert taken.lengths.tolist() == cached.lengths[order].tolist()
    assert taken.num_targets.tolist() == cached.num_targets[order].tolist()
    assert taken.piece_counts(ids).tolist() == cached.piece_counts(np.array(order)).tolist()
    assert taken.count_pieces(ids) == cached.count_pieces(ids)
    assert taken.longest_piece(ids, LENGTH) == cached.longest_piece(ids, LENGTH)


def test_each_pass_has_all_records_in_another_order(build_plan) -> None:
    stream = RowStream(build_plan(), Cursor())
    passes = [list_rows(stream.take(NUM_RECORDS)) for _ in range(3)]
    assert sorted(passes[0]) == sorted(passes[1]) == sorted(passes[2]) and len(set(passes[0])) == NUM_RECORDS
    assert passes[0] != passes[1] != passes[2]
    assert stream.cursor.position.pass_number == 2
    other = RowStream(build_plan(seed=4), Cursor())
    assert list_rows(other.take(NUM_RECORDS)) != passes[0]


@pytest.mark.parametrize("rows", PLANS)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_neither_workers_nor_the_number_taken_at_once_change_the_rows(rows: str, num_workers: int, build_plan) -> None:
    whole = list_rows(RowStream(build_plan(rows), Cursor()).take(100))
    stream = RowStream(build_plan(rows), Cursor(), num_workers)
    parts = [stream.take(count) for count in (1, 30, 7, 62)]
    assert list_rows(join_rows(parts)) == whole


@pytest.mark.parametrize("rows", PLANS)
def test_a_cursor_finds_any_row_and_nothing_before_its_block_is_tokenized(rows: str, build_plan, monkeypatch) -> None:
    plan = build_plan(rows)
    whole, stream, tail = list_rows(RowStream(plan, Cursor()).take(110)), RowStream(plan, Cursor()), 10
    encode, encoded = StreamPlan.encode, []

    def count(self: StreamPlan, block: RecordBlock):
        encoded.append(block.position)
        return encode(self, block)

    for start in range(100):
        cursor = Cursor.from_json(json.loads(json.dumps(stream.cursor.to_json())))
        with monkeypatch.context() as patch:
            patch.setattr(StreamPlan, "encode", count)
            encoded.clear()
            assert list_rows(RowStream(plan, cursor).take(tail)) == whole[start : start + tail], start
            assert encoded[0] == cursor.position and len(encoded) <= 6, start
        stream.take(1)


def test_a_cursor_beyond_the_rows_of_its_block_begins_the_next_one(build_plan) -> None:
    """As where the rows of a block are fewer than before: what is asked for is what is taken."""
    taken = RowStream(build_plan(block_records=9), Cursor(row=50)).take(4)
    assert len(taken) == 4


def test_a_data_set_of_the_hub_is_read_without_being_downloaded(
    build_plan, folder: Path, tmp_path, monkeypatch
) -> None:
    """Through `datasets`, from a folder: its files are the shards."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number, count in enumerate((4, 9, 2)):
        text = "".join(json.dumps(record) + "\n" for record in make_records(number * 10, count))
        (corpus / f"train-{number}.jsonl").write_text(text)
    plan = build_plan(files=f"hf:{corpus}", block_records=4)
    assert [shard.part for shard in plan.shards] == [0, 1, 2]
    one, other = (
        list_rows(RowStream(build_plan(files=f"{source}", block_records=4), Cursor()).take(40))
        for source in (f"hf:{corpus}", f"{corpus}/*.jsonl")
    )
    assert one == other, "as from its files"
    assert list_rows(RowStream(plan, Cursor(), num_workers=2).take(40)) == one
    stream = RowStream(plan, Cursor())
    stream.take(11)
    assert list_rows(RowStream(plan, stream.cursor).take(29)) == one[11:]
    assert not list(tmp_path.glob("cache/**/*.arrow")), "nothing is kept on the disk"


def test_a_bad_record_ends_the_run_or_is_counted(build_plan, tmp_path: Path) -> None:
    lines = [json.dumps(record) for record in make_records(0, 12)]
    lines[4] = lines[4][:-3]
    file = tmp_path / "bad.jsonl"
    file.write_text("\n".join(lines))
    plan = build_plan(files=str(file), block_records=3)
    for num_workers in (0, 2):
        stream = RowStream(plan, Cursor(), num_workers)
        assert len(stream.take(3)) == 3
        with pytest.raises(UserError, match=rf"^{file}:5: not valid JSON.*fix or remove the line"):
            stream.take(1)
    stream = RowStream(build_plan(files=str(file), block_records=3, on_bad_record=OnBadRecord.skip), Cursor())
    stream.take(11)
    assert stream.counts.num_skipped == 1 and f"{file}:5" in stream.counts.describe()


def test_a_shard_that_changes_after_it_was_listed_is_named(build_plan, tmp_path: Path) -> None:
    """Before its first record is read, and in a later pass."""
    file, lines = tmp_path / "grows.jsonl", [json.dumps(record) + "\n" for record in make_records(0, 6)]
    file.write_text("".join(lines[:4]))
    plan = build_plan(files=str(file))
    begun = RowStream(plan, Cursor())
    begun.take(4)
    file.write_text("".join(lines))
    for stream in (RowStream(plan, Cursor()), begun, RowStream(plan, Cursor(), num_workers=2)):
        with pytest.raises(UserError, match=rf"^train_file: {file} has changed since the run began: it was .* bytes"):
            stream.take(1)


def test_shards_without_a_usable_record_end_the_run(build_plan, tmp_path: Path) -> None:
    file = tmp_path / "none.jsonl"
    file.write_text("{}\n{}\n")
    stream = RowStream(build_plan(files=str(file), on_bad_record=OnBadRecord.skip), Cursor())
    with pytest.raises(UserError, match="none of the 4 records of its 1 shard is left to train on; the first: .*:1"):
        stream.take(1)
    file.write_text("\n")
    with pytest.raises(UserError, match=r"train_file holds no records \(1 shard\)"):
        RowStream(build_plan(files=str(file)), Cursor()).take(1)
