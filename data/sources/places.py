"""Places in a source, from which reading continues without the records before them."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

from data.sources.formats import RawRecord, has_plain_lines, read_lines, read_parquet
from data.sources.hub import PREFIX as HUB_PREFIX
from data.sources.hub import read_hub_file
from data.sources.records import COMPONENT_PREFIX, read_records


@dataclass(frozen=True)
class Place:
    """A place between two records of a source. records: those before it. offset, lines: the bytes and lines before it
    in a file of plain JSON lines; 0 in others."""

    records: int = 0
    offset: int = 0
    lines: int = 0


def read_from(source: str, part: int, place: Place) -> Iterator[tuple[RawRecord, Place]]:
    """Yield every record of a source after a place, in order, each with the place after it.

    part: of a data set of the hub, the number of one of its files. A file of plain JSON lines is read from the byte
    on, Parquet from the row group on; of others the records before the place are read, and thrown away. Raises
    UserError for a source that cannot be read.
    """
    if not source.startswith((HUB_PREFIX, COMPONENT_PREFIX)) and has_plain_lines(source):
        for record, offset, lines in read_lines(source, place.offset, place.lines):
            place = Place(place.records + 1, offset, lines)
            yield record, place
        return
    for record in _read_rest(source, part, place.records):
        place = replace(place, records=place.records + 1)
        yield record, place


def _read_rest(source: str, part: int, first: int) -> Iterator[RawRecord]:
    if source.startswith(HUB_PREFIX):
        return read_hub_file(source, part, first)
    if source.lower().endswith(".parquet"):
        return read_parquet(source, first)
    return islice(read_records(source), first, None)
