"""Every file format gives the same records, compressed or not; errors of damaged files."""

import gzip
import json
from collections.abc import Callable
from datetime import date
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from data.sources.formats import has_maps, read_file
from errors import UserError

RECORDS = [
    {"prompt": 'caf\u00e9, "quoted"', "completion": "two\nlines\u2028"},
    {"prompt": "", "completion": "1;2,3\t4"},
    {"prompt": "a\\n", "completion": "\U0001f600"},
]


def to_csv(records: list[dict], separator: str = ",") -> bytes:
    def quote(value: str) -> str:
        return '"' + value.replace('"', '""') + '"'

    lines = [separator.join(records[0]), *(separator.join(map(quote, record.values())) for record in records)]
    return "\r\n".join(lines).encode()


WRITERS: dict[str, Callable[[], bytes]] = {
    "jsonl": lambda: "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in RECORDS).encode(),
    "json": lambda: json.dumps(RECORDS, indent=1).encode(),
    "csv": lambda: b"\xef\xbb\xbf" + to_csv(RECORDS),
    "tsv": lambda: to_csv(RECORDS, "\t"),
}
COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": lambda data: gzip.compress(data[:9]) + gzip.compress(data[9:]),
    ".zst": lambda data: b"".join(pyarrow.Codec("zstd").compress(part, asbytes=True) for part in (data[:9], data[9:])),
}


def write(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    return str(path)


def read(path: str) -> list[dict]:
    records = list(read_file(path))
    assert all(record.problem is None and record.location.startswith(path) for record in records)
    return [json.loads(record.text) for record in records]


@pytest.mark.parametrize("compression", COMPRESSORS)
@pytest.mark.parametrize("kind", WRITERS)
def test_every_format_gives_the_same_records(tmp_path: Path, kind: str, compression: str) -> None:
    path = write(tmp_path / f"a.b.{kind}{compression}", COMPRESSORS[compression](WRITERS[kind]()))
    assert read(path) == RECORDS


def test_null_fields_of_arrow_are_removed(tmp_path: Path) -> None:
    path, calls = str(tmp_path / "a.parquet"), [{"name": "look", "arguments": {"city": "Lima"}}]
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "", "tool_calls": calls}]
    records = [{"messages": turns, "note": None}, {"messages": [{"role": "user", "content": "a"}], "note": "x"}]
    parquet.write_table(pyarrow.Table.from_pylist(records), path)
    assert [json.loads(record.text) for record in read_file(path)] == records


def test_maps_of_parquet_are_objects(tmp_path: Path) -> None:
    path = str(tmp_path / "a.parquet")
    inner = pyarrow.map_(pyarrow.string(), pyarrow.string())
    turns = pyarrow.list_(pyarrow.struct([("role", pyarrow.string()), ("arguments", inner)]))
    records = [
        {"messages": [{"role": "user", "arguments": {"city": "Lima"}}], "kwargs": {"a": "b", "c": "d"}},
        {"messages": [{"role": "tool", "arguments": {}}], "kwargs": {}},
    ]
    schema = pyarrow.schema([("messages", turns), ("kwargs", inner)])
    parquet.write_table(pyarrow.Table.from_pylist(records, schema), path)
    assert [json.loads(record.text) for record in read_file(path)] == records
    twice = pyarrow.table({"kwargs": pyarrow.array([[("a", "b"), ("a", "c")]], inner)})
    parquet.write_table(twice, path)
    with pytest.raises(UserError, match=f"^{path}: after row 0 a map has one key twice; keep one of them"):
        list(read_file(path))


def test_bytes_of_parquet_are_text_or_an_error_that_names_row_and_column(tmp_path: Path) -> None:
    """Some writers store text as binary; `b'...'` would be trained on."""
    path = str(tmp_path / "a.parquet")
    rows = [
        {"prompt": "caf\u00e9".encode(), "turns": [{"content": b"a"}], "day": None},
        {"prompt": b"b", "turns": [{"content": b"\x89PNG"}], "day": date(2026, 1, 2)},
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    first, second = read_file(path)
    assert (
        json.loads(first.text) == {"prompt": "caf\u00e9", "turns": [{"content": "a"}], "day": None}
        and first.problem is None
    )
    assert second.problem == (
        f"{path}: row 2: column 'turns' holds bytes that are not UTF-8 text (byte 0x89 at position 0); store it as "
        "text, or remove the column"
    )


def test_a_map_of_parquet_is_a_mapping(tmp_path: Path) -> None:
    path, maps = str(tmp_path / "a.parquet"), pyarrow.map_(pyarrow.string(), pyarrow.int64())
    parquet.write_table(pyarrow.table({"m": pyarrow.array([[("a", 1), ("b", 2)], []], maps)}), path)
    assert read(path) == [{"m": {"a": 1, "b": 2}}, {"m": {}}] and has_maps(path)
    parquet.write_table(pyarrow.table({"m": pyarrow.array([[("a", 1), ("a", 2)]], maps)}), path)
    with pytest.raises(UserError, match="after row 0 a map has one key twice; keep one of them"):
        read(path)
    parquet.write_table(pyarrow.table({"m": [1]}), path)
    assert not has_maps(path) and not has_maps(str(tmp_path / "a.jsonl"))


def test_parquet(tmp_path: Path) -> None:
    path = str(tmp_path / "a.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(RECORDS * 700), path, row_group_size=500)
    assert read(path) == RECORDS * 700
    assert [record.location for record in read_file(path)][-1] == f"{path}: row 2100"


@pytest.mark.parametrize("compression", COMPRESSORS)
def test_a_text_file_is_one_record(tmp_path: Path, compression: str) -> None:
    text = "One.\r\n\n Two.\u00e9\n"
    path = write(tmp_path / f"a.txt{compression}", COMPRESSORS[compression](text.encode()))
    assert read(path) == [{"text": text}]


def test_rows_are_numbered_by_their_first_line(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", b'q,a\n"1\n2",b\n\n c,d\n')
    assert [(r.location, json.loads(r.text)) for r in read_file(path)] == [
        (f"{path}:2", {"q": "1\n2", "a": "b"}),
        (f"{path}:5", {"q": " c", "a": "d"}),
    ]


def test_a_bad_row_is_reported_and_the_others_are_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", b"q,a\nb,c\nd\ne,\xff\nf,g,h\ni,j\n")
    assert [record.problem for record in read_file(path)] == [
        None,
        f"{path}:3: 1 column, but the first line names 2 (q, a); fix or remove the row",
        f"{path}:4: not UTF-8 text; convert the file to UTF-8",
        f"{path}:5: 3 columns, but the first line names 2 (q, a); fix or remove the row",
        None,
    ]


DAMAGED: dict[str, tuple[str, bytes, str]] = {
    "gzip cut off": (
        "a.jsonl.gz",
        gzip.compress(WRITERS["jsonl"]() * 99)[:-20],
        "{file} cannot be read: .*; the file is damaged or cut off",
    ),
    "no gzip": ("a.jsonl.gz", b'{"a": 1}\n', "{file} cannot be read: Not a gzipped file .*; the file is damaged"),
    "zstd cut off": (
        "a.jsonl.zst",
        COMPRESSORS[".zst"](WRITERS["jsonl"]() * 99)[:-20],
        "{file} cannot be read: .*; the file is damaged or cut off",
    ),
    "no zstd": ("a.jsonl.zst", b'{"a": 1}\n', "{file} cannot be read: .*; the file is damaged or cut off"),
    "no parquet": (
        "a.parquet",
        b"PAR1 not",
        "{file} cannot be read after row 0: .*; it is damaged or not a Parquet file",
    ),
    "compressed parquet": ("a.parquet.gz", b"", "{file}: Parquet is compressed inside already; decompress the file"),
    "open quote": (
        "a.csv",
        b'q,a\nb,c\nd,"e\nf,g\n',
        "{file}:3: not valid CSV: .*; fix the quotes that open on that line",
    ),
    "no names": ("a.csv", b"q,q\n1,2\n", "{file}:1: the first line must name the columns"),
    "text in another encoding": ("a.txt", b"one\ncaf\xe9\n", "{file}:2: not UTF-8 text \\(byte 0xe9 at position 3\\)"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file(tmp_path: Path, name: str) -> None:
    file, content, message = DAMAGED[name]
    path = write(tmp_path / file, content)
    with pytest.raises(UserError, match="^" + message.format(file=path)):
        list(read_file(path))
