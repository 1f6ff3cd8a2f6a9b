"""Offsets into a source, from which reading continues without the records before them."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from data.sources.formats import RawRecord, has_plain_lines, read_lines, read_parquet
from data.sources.hub import PREFIX as HUB_PREFIX
from data.sources.hub import read_hub_file
from data.sources.records import COMPONENT_PREFIX, read_records


@dataclass(frozen=True)
class RecordOffset:
    """The offset of a record in its source. num_records: those before it. num_bytes, num_lines: those before it in a
    file of plain JSON lines; 0 in others."""

    num_records: int = 0
    num_bytes: int = 0
    num_lines: int = 0


def read_from(source: str, part: int, offset: RecordOffset) -> Iterator[tuple[RawRecord, RecordOffset]]:
    """Yield every record of a source from an offset on, in order, each with the offset after it.

    part: of a data set of the hub, the number of one of its files. A file of plain JSON lines is read from the byte
    on, Parquet from the row group on; of others the records before the offset are read and thrown away. Raises
    UserError for a source that cannot be read.
    """
    number = offset.num_records
    if not source.startswith((HUB_PREFIX, COMPONENT_PREFIX)) and has_plain_lines(source):
        for record, num_bytes, num_lines in read_lines(source, offset.num_bytes, offset.num_lines):
            number += 1
            yield record, RecordOffset(number, num_bytes, num_lines)
        return
    for record in _read_rest(source, part, number):
        number += 1
        yield record, RecordOffset(number)


def _read_rest(source: str, part: int, first: int) -> Iterator[RawRecord]:
    if source.startswith(HUB_PREFIX):
        return read_hub_file(source, part, first)
    if source.lower().endswith(".parquet"):
        return read_parquet(source, first)
    return islice(read_records(source), first, None)
