"""One reader per file format, chosen by the file's name: records as JSON text with their place in the file.

    .parquet                  one record per row
    .csv .tsv                 one record per row, the fields named by the first line
    .txt .text .md            one record, {"text": the whole file}
    .json                     an array of objects, or JSON lines
    anything else             JSON lines

All but Parquet may be compressed: `.gz`, `.zst`. An error in one record (a line that is not UTF-8) becomes its
`problem`; an error in the file (a damaged archive, a broken array) raises `UserError`.
"""

import csv
import gzip
import io
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet

from console import pluralize
from errors import UserError

UTF8_BOM = b"\xef\xbb\xbf"
COMPRESSIONS = (".gz", ".zst")
TEXT_SUFFIXES = (".txt", ".text", ".md")
SEPARATORS = {".csv": ",", ".tsv": "\t"}
# A field of a CSV file may be a whole document; the module's own limit is 128 KiB.
MAX_CSV_FIELD = 2**31 - 1


@dataclass(frozen=True)
class RawRecord:
    """A record as JSON text. location: what errors name (`train.jsonl:12`). problem: the error if it cannot be read."""

    location: str
    text: str = ""
    problem: str | None = None


def read_file(path: str) -> Iterator[RawRecord]:
    """Yield every record of a file, in order, without blank lines. Raises `UserError` for an unreadable file."""
    kind, compression = _split_suffixes(path)
    if kind == ".parquet":
        if compression:
            raise UserError(f"{path}: Parquet is compressed inside already; decompress the file")
        return read_parquet(path)
    if kind in SEPARATORS:
        return _read_table(path, SEPARATORS[kind])
    if kind in TEXT_SUFFIXES:
        return _read_text(path)
    if kind == ".json" and _holds_array(path):
        return _read_array(path)
    return (record for record, _, _ in read_lines(path))


def has_plain_lines(path: str) -> bool:
    """Return whether a file holds JSON lines that are not compressed, so that reading can begin at any of them."""
    kind, compression = _split_suffixes(path)
    special = (".parquet", *SEPARATORS, *TEXT_SUFFIXES)
    return not compression and kind not in special and not (kind == ".json" and _holds_array(path))


def estimate_num_records(path: str, first: Sequence[RawRecord]) -> float:
    """Estimate the records of a file from its size and the length of the first records (of it, or of one like it);
    exact where the format stores their number.
    """
    kind, compression = _split_suffixes(path)
    if kind in TEXT_SUFFIXES:
        return 1
    if kind == ".parquet":
        try:
            return parquet.read_metadata(path).num_rows
        except (pyarrow.ArrowException, OSError):
            return 0  # reading it reports what is wrong
    texts = [record.text for record in first]
    if kind in SEPARATORS:  # the names of the fields are not in each row
        texts = [SEPARATORS[kind].join(map(str, json.loads(text).values())) for text in texts if text]
    mean = sum(len(text.encode()) + 1 for text in texts) / max(1, len(texts))
    return os.path.getsize(path) * _estimate_expansion(path, compression) / max(1, mean)


def _estimate_expansion(path: str, compression: str) -> float:
    """Estimate the bytes of text per byte of the file from its beginning."""
    if not compression:
        return 1
    with open(path, "rb") as file:
        head = file.read(2**20)
    read = 0
    with suppress(EOFError, OSError), io.BytesIO(head) as cut_off:
        stream = (
            gzip.GzipFile(fileobj=cut_off) if compression == ".gz" else pyarrow.CompressedInputStream(cut_off, "zstd")
        )
        while text := stream.read(2**16):
            read += len(text)
    return read / max(1, len(head))


def _split_suffixes(path: str) -> tuple[str, str]:
    """Return (".jsonl", ".gz") for a.jsonl.gz; "" for a missing suffix."""
    suffixes = ["", *(suffix.lower() for suffix in Path(path).suffixes)]
    compression = suffixes.pop() if suffixes[-1] in COMPRESSIONS else ""
    return suffixes[-1] if suffixes else "", compression


@contextmanager
def _open(path: str) -> Iterator[gzip.GzipFile | io.BufferedReader]:
    """Open the file for reading, decompressed. Raises UserError when it cannot be read."""
    try:
        if path.lower().endswith(".gz"):
            file: gzip.GzipFile | io.BufferedReader = gzip.open(path, "rb")
        elif path.lower().endswith(".zst"):
            file = io.BufferedReader(pyarrow.input_stream(path, compression="zstd"))
        else:
            file = open(path, "rb")
        with file:
            yield file
    except (EOFError, zlib.error, OSError) as error:
        raise UserError(
            f"{path} cannot be read: {str(error).rstrip('.')}; the file is damaged or cut off, copy it again"
        ) from None


def read_lines(path: str, offset: int = 0, number: int = 0) -> Iterator[tuple[RawRecord, int, int]]:
    """Yield every record of a file of JSON lines from a byte on, and the bytes and the lines up to its end. number: of
    the lines before the first one."""
    with _open(path) as file:
        if offset:  # a stream that is decompressed has no other beginning
            file.seek(offset)
        for line in file:
            offset, number = offset + len(line), number + 1
            record = _decode(line.removeprefix(UTF8_BOM) if number == 1 else line, f"{path}:{number}")
            if record.problem or record.text.strip():
                yield record, offset, number


def _decode(line: bytes, location: str) -> RawRecord:
    try:
        return RawRecord(location, line.decode("utf-8"))
    except UnicodeDecodeError as error:
        byte = line[error.start]
        problem = f"{location}: not UTF-8 text (byte 0x{byte:02x} at position {error.start}); convert the file to UTF-8"
        return RawRecord(location, problem=problem)


def _holds_array(path: str) -> bool:
    with _open(path) as file:
        for number, line in enumerate(file, start=1):
            text = (line.removeprefix(UTF8_BOM) if number == 1 else line).strip()
            if text:
                return text.startswith(b"[")
    return False


def _read_array(path: str) -> Iterator[RawRecord]:
    text = _read_whole(path)
    try:
        records = json.loads(text)
    except (ValueError, RecursionError) as error:
        line = error.lineno if isinstance(error, json.JSONDecodeError) else 1
        raise UserError(f"{path}:{line}: not valid JSON: {describe_json_error(error)}; fix the file") from None
    for number, record in enumerate(records, start=1):
        yield RawRecord(f"{path}: record {number}", json.dumps(record))


def _read_text(path: str) -> Iterator[RawRecord]:
    yield RawRecord(path, json.dumps({"text": _read_whole(path)}))


def _read_whole(path: str) -> str:
    """Return the text of a file. Raises UserError naming the first line that is not UTF-8."""
    with _open(path) as file:
        content = file.read().removeprefix(UTF8_BOM)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        number = content.count(b"\n", 0, error.start) + 1
        start = content.rfind(b"\n", 0, error.start) + 1
        line = content[start:].split(b"\n", 1)[0]
        # It has one: the line is not UTF-8
        raise UserError(_decode(line, f"{path}:{number}").problem) from None  # type: ignore[arg-type]


def _read_table(path: str, separator: str) -> Iterator[RawRecord]:
    csv.field_size_limit(MAX_CSV_FIELD)
    # A byte that is not UTF-8 becomes half of a surrogate pair, and is reported with its record.
    with _open(path) as file, io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline="") as text:
        rows = csv.reader(text, delimiter=separator, strict=True)
        names: list[str] = []
        line = 1
        while True:
            try:
                row = next(rows)
            except StopIteration:
                return
            except csv.Error as error:
                raise UserError(
                    f"{path}:{line}: not valid CSV: {error}; fix the quotes that open on that line"
                ) from None
            location = f"{path}:{line}"
            line = rows.line_num + 1
            if not names:
                names = _check_header(row, location)
            elif row:
                yield _build_row(row, names, location)


def _check_header(names: list[str], location: str) -> list[str]:
    if not all(names) or len(set(names)) < len(names):
        raise UserError(f"{location}: the first line must name the columns, each by a name of its own, not {names}")
    return names


def _build_row(row: list[str], names: list[str], location: str) -> RawRecord:
    if len(row) != len(names):
        problem = (
            f"{location}: {pluralize(len(row), 'column')}, but the first line names {len(names)} ({', '.join(names)}); "
            "fix or remove the row"
        )
        return RawRecord(location, problem=problem)
    try:
        "".join(row).encode("utf-8")
    except UnicodeEncodeError:
        return RawRecord(location, problem=f"{location}: not UTF-8 text; convert the file to UTF-8")
    return RawRecord(location, json.dumps(dict(zip(names, row))))


def drop_absent(record: dict) -> dict:
    """Return a record of Arrow without null fields: Arrow gives every object of a column the fields of all of them, and
    a chat template would take a null one for a tool call, or show it to the model.
    """
    return {name: _drop_nulls(value) for name, value in record.items()}


def _drop_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _drop_nulls(part) for name, part in value.items() if part is not None}
    return [_drop_nulls(part) for part in value] if isinstance(value, list) else value


def read_parquet(path: str, first: int = 0) -> Iterator[RawRecord]:
    """Yield every row of a file, without the `first` ones. Row groups that lie among those are not read."""
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            group, number = _find_row_group(file.metadata, first)
            for batch in file.iter_batches(batch_size=1000, row_groups=range(group, file.num_row_groups)):
                omitted = min(max(0, first - number), len(batch))
                number += omitted
                for record in batch.slice(omitted).to_pylist(maps_as_pydicts="strict"):
                    number += 1
                    yield encode_row(record, f"{path}: row {number}")
    except KeyError:
        raise UserError(f"{path}: after row {number} a map has one key twice; keep one of them") from None
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise UserError(
            f"{path} cannot be read after row {number}: {reason}; it is damaged or not a Parquet file"
        ) from None


def has_maps(path: str) -> bool:
    """Return whether a Parquet file has columns of maps."""
    try:
        return _split_suffixes(path)[0] == ".parquet" and "map<" in str(parquet.read_schema(path))
    except (pyarrow.ArrowException, OSError):  # which reading it reports
        return False


def _find_row_group(metadata: parquet.FileMetaData, row: int) -> tuple[int, int]:
    """Return the row group of a row (from 0), and the rows before the group."""
    before = 0
    for group in range(metadata.num_row_groups):
        size = metadata.row_group(group).num_rows
        if row < before + size:
            return group, before
        before += size
    return metadata.num_row_groups, before


def encode_row(record: dict, location: str) -> RawRecord:
    """Return a row of Arrow as JSON text, without nulls inside of its columns. Bytes are UTF-8 text, or a problem that
    names their column; dates and the like become the text that Python prints."""
    texts = {}
    for name, value in drop_absent(record).items():
        try:
            texts[name] = json.dumps(value, default=_to_text)
        except UnicodeDecodeError as error:
            byte = error.object[error.start]
            problem = (
                f"{location}: column '{name}' holds bytes that are not UTF-8 text (byte 0x{byte:02x} at position "
                f"{error.start}); store it as text, or remove the column"
            )
            return RawRecord(location, problem=problem)
    return RawRecord(location, f"{{{', '.join(f'{json.dumps(name)}: {text}' for name, text in texts.items())}}}")


def _to_text(value: Any) -> str:
    return value.decode("utf-8") if isinstance(value, bytes) else str(value)


def describe_json_error(error: Exception) -> str:
    """Return the message of a JSON error, with its column where it has one."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg}, column {error.colno}"
    return str(error)
