"""How much disk a tokenized folder will need, computed before it is made."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from data.options import OnBadRecord
from data.sources.records import estimate_num_records, read_records
from data.storage.encoding import Encoding, encode_batch
from data.storage.tokenized import BYTES_PER_SAMPLE, BYTES_PER_TOKEN
from errors import UserError

SAMPLE_RECORDS = 200  # of each entry of `train_file`


@dataclass(frozen=True)
class SizeEstimate:
    """Of all records, as the first ones of each entry let expect."""

    num_records: int
    num_bytes: int


def estimate_size(sources: Sequence[Sequence[str]], encoding: Encoding) -> SizeEstimate | None:
    """sources: the files of each entry. None where nothing says how many records there are, or how large they get."""
    skipping = replace(encoding, on_bad_record=OnBadRecord.skip)
    num_records = num_bytes = 0.0
    for group in sources:
        first = list(islice(read_records(group[0]), SAMPLE_RECORDS))
        if not first:
            continue
        of_sources = [count for source in group if (count := estimate_num_records(source, first)) is not None]
        if len(of_sources) < len(group):
            return None
        columns = encode_batch(first, skipping).columns
        if not len(columns["length"]):
            return None  # none of them is a sample: whoever reads them all says why
        of_first = BYTES_PER_TOKEN * len(columns["input_ids"]) + BYTES_PER_SAMPLE * len(columns["length"])
        num_records += sum(of_sources)
        num_bytes += sum(of_sources) * of_first / len(first)
    return SizeEstimate(round(num_records), round(num_bytes))


def check_room(num_bytes: int, folder: Path, key: str) -> int:
    """The bytes that are free where `folder` is. Raises UserError when they are fewer than `num_bytes`."""
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        raise UserError(
            f"{key}: tokenized it will need about {describe_bytes(num_bytes)}, and in {folder} "
            f"{describe_bytes(free)} are free; make room, or choose another folder with data.cache_dir"
        )
    return free


def describe_bytes(count: float) -> str:
    """Three digits and a unit: 12.3 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} TB"
