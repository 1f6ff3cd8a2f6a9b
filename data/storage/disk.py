"""Estimates, before files are tokenized, the disk space that they will need and the rows that they will become."""

import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np

from data.options import OnBadRecord
from data.sources.formats import RawRecord
from data.sources.indexed import PREFIX as INDEXED_PREFIX
from data.sources.records import estimate_num_records, read_records
from data.storage.encoding import Encoding, encode_batch
from data.storage.packing import Pieces
from data.storage.rows import RowPlan, build_pieces, lay_windows
from data.storage.tokenized import BYTES_PER_SAMPLE, BYTES_PER_TOKEN, HASH_DTYPE, find_damage
from errors import Ending, UserError

# The first records of each entry of `train_file`, up to a number of records, or of characters: they take some seconds
# to tokenize. An entry that begins with a longer record is not estimated: it would be tokenized twice.
SAMPLE_RECORDS, ROW_SAMPLE_RECORDS, SAMPLE_CHARACTERS = 200, 2000, 2**21  # ROW_...: to count rows


@dataclass(frozen=True)
class SizeEstimate:
    """Records and bytes of the whole folder, estimated from the first records of each entry."""

    num_records: int
    num_bytes: int


@dataclass(frozen=True)
class RowEstimate:
    """The rows of an epoch, or the groups of rows that stay together. is_exact: every record was counted."""

    num_rows: int
    is_exact: bool


@dataclass(frozen=True)
class _Sampled:
    """The first records of an entry. num_records: of the entry, estimated. columns: as `encode_batch` returns them."""

    num_first: int
    num_records: float
    columns: dict[str, np.ndarray]
    is_whole: bool


def estimate_size(sources: Sequence[Sequence[str]], encoding: Encoding) -> SizeEstimate | None:
    """Estimate the size of the tokenized folder; None where the number or the size of the records cannot be known, and
    where a first record is very long.

    sources: the files of each entry.
    """
    num_records = num_bytes = 0.0
    for entry in _sample_entries(sources, encoding, SAMPLE_RECORDS):
        if entry is None:
            return None
        num_first_bytes = (
            BYTES_PER_TOKEN * len(entry.columns["input_ids"])
            + BYTES_PER_SAMPLE * len(entry.columns["length"])
            + HASH_DTYPE.itemsize * entry.num_first
        )
        num_records += entry.num_records
        num_bytes += entry.num_records * num_first_bytes / entry.num_first
    return SizeEstimate(round(num_records), round(num_bytes))


def estimate_rows(
    sources: Sequence[Sequence[str]], encoding: Encoding, plan: RowPlan, cache_dir: str | Path
) -> RowEstimate | None:
    """Estimate the rows of files: from their tokens where these are cached, else from their first records. Of samples
    that are laid out with companions, the rows are those without, unless both are cached.

    None where the number of records cannot be known, a first record is very long or none becomes a sample, and, of
    what is not cached, for a mixture and for corpora that are tokenized already. Raises UserError for files that cannot
    be read.
    """
    path = Path(cache_dir) / encoding.compute_key(sources)
    if find_damage(path, compares_bytes=False) is None:
        is_exact = not plan.companion or find_damage(path / plan.companion, compares_bytes=False) is None
        windows = build_pieces(path, plan if is_exact else replace(plan, companion=""))
        return RowEstimate(_count_groups(windows, plan), is_exact)
    if plan.mixture is not None or any(source.startswith(INDEXED_PREFIX) for group in sources for source in group):
        return None
    entries: list[_Sampled] = []
    for entry in _sample_entries(sources, encoding, ROW_SAMPLE_RECORDS):
        if entry is None:
            return None
        entries.append(entry)
    # The samples of all entries share rows
    lengths = np.concatenate([np.zeros(0, np.int32), *(entry.columns["length"] for entry in entries)])
    if encoding.selection.hold_out is None and all(entry.is_whole for entry in entries):
        return RowEstimate(_count_groups(lay_windows(lengths, plan), plan), not plan.companion)
    num_rows = 0.0
    for entry in entries:
        laid = _count_groups(lay_windows(entry.columns["length"], plan), plan)
        num_rows += encoding.selection.estimate_taken(entry.num_records) * laid / entry.num_first
    return RowEstimate(round(num_rows), is_exact=False)


def _count_groups(windows: Iterable[Pieces], plan: RowPlan) -> int:
    """Return the rows of the windows, or the groups of rows that stay together."""
    return sum(pieces.num_rows for pieces in windows) // plan.rows_per_group


def _sample_entries(
    sources: Sequence[Sequence[str]], encoding: Encoding, most_records: int
) -> Iterator[_Sampled | None]:
    """Yield the first records of each entry that has any; None where too little is known, or takes long to know."""
    skipping = replace(encoding, on_bad_record=OnBadRecord.skip)
    limit = encoding.selection.max_records or sys.maxsize
    for group in sources:
        records = islice(read_records(group[0]), limit)
        first = list(_take_first(records, most_records))
        if not first:
            continue
        if len(first[0].text) > SAMPLE_CHARACTERS:
            yield None
            continue
        is_whole = len(group) == 1 and next(records, None) is None
        counts = [count for source in group if (count := estimate_num_records(source, first)) is not None]
        columns = encode_batch(first, skipping).columns
        if len(counts) < len(group) or not len(columns["length"]):
            yield None  # of the latter tokenizing reports why
        else:
            yield _Sampled(len(first), len(first) if is_whole else min(sum(counts), limit), columns, is_whole)


def _take_first(records: Iterator[RawRecord], most_records: int) -> Iterator[RawRecord]:
    num_characters = 0
    for record in islice(records, most_records):
        yield record
        num_characters += len(record.text)
        if num_characters >= SAMPLE_CHARACTERS:
            return


def check_room(num_bytes: int, folder: Path, key: str) -> int:
    """Return the free bytes of the disk that holds `folder`. Raises UserError when they are fewer than `num_bytes`."""
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        raise UserError(
            f"{key}: the tokenized data will need about {describe_bytes(num_bytes)}, but {folder} has "
            f"{describe_bytes(free)} free; make room, or choose another folder with data.cache_dir",
            Ending.DISK,
        )
    return free


def describe_bytes(count: float) -> str:
    """Return a number of bytes as three digits and a unit: 12.3 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} TB"
