"""The disk space that a tokenized folder will need, estimated before it is written."""

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from data.options import OnBadRecord
from data.sources.records import estimate_num_records, read_records
from data.storage.encoding import Encoding, encode_batch
from data.storage.tokenized import BYTES_PER_SAMPLE, BYTES_PER_TOKEN, HASH_DTYPE
from errors import UserError

SAMPLE_RECORDS = 200  # of each entry of `train_file`


@dataclass(frozen=True)
class SizeEstimate:
    """Records and bytes of the whole folder, estimated from the first records of each entry."""

    num_records: int
    num_bytes: int


def estimate_size(sources: Sequence[Sequence[str]], encoding: Encoding) -> SizeEstimate | None:
    """Estimate the size of the tokenized folder; None where the number or the size of the records cannot be known.

    sources: the files of each entry.
    """
    skipping = replace(encoding, on_bad_record=OnBadRecord.skip)
    num_records = num_bytes = 0.0
    limit = encoding.selection.max_records or sys.maxsize
    for group in sources:
        first = list(islice(read_records(group[0]), min(SAMPLE_RECORDS, limit)))
        if not first:
            continue
        counts = [count for source in group if (count := estimate_num_records(source, first)) is not None]
        if len(counts) < len(group):
            return None
        columns = encode_batch(first, skipping).columns
        num_group = min(sum(counts), limit)
        if not len(columns["length"]):
            return None  # none of them becomes a sample: tokenizing reports why
        num_first_bytes = (
            BYTES_PER_TOKEN * len(columns["input_ids"])
            + BYTES_PER_SAMPLE * len(columns["length"])
            + HASH_DTYPE.itemsize * len(first)
        )
        num_records += num_group
        num_bytes += num_group * num_first_bytes / len(first)
    return SizeEstimate(round(num_records), round(num_bytes))


def check_room(num_bytes: int, folder: Path, key: str) -> int:
    """Return the free bytes of the disk that holds `folder`. Raises UserError when they are fewer than `num_bytes`."""
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        raise UserError(
            f"{key}: the tokenized data will need about {describe_bytes(num_bytes)}, but {folder} has "
            f"{describe_bytes(free)} free; make room, or choose another folder with data.cache_dir"
        )
    return free


def describe_bytes(count: float) -> str:
    """Return a number of bytes as three digits and a unit: 12.3 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} TB"
