"""The smallest hashes of the records of the files: they bound the part that `data.eval_samples` holds out.

One pass over the files, spread over the processes that tokenize; memory grows with the number asked for alone.
"""

from collections.abc import Iterable, Sequence
from functools import partial

import numpy as np

from console import progress
from data.sources.formats import RawRecord
from data.sources.records import parse_record
from data.sources.selection import Selection, hash_record
from data.storage.workers import map_in_order
from errors import UserError


def list_smallest_hashes(
    count: int,
    batches: Iterable[Sequence[RawRecord]],
    selection: Selection,
    *,
    key: str,
    num_proc: int,
    shown: bool,
) -> np.ndarray:
    """Return up to `count` of the smallest different hashes of the records that the filter keeps, uint64, ascending.

    Records that cannot be read are left out: encoding reports them. key: for the bar that is shown.
    """
    smallest = np.empty(0, np.uint64)
    with progress(f"choosing what {key} holds out", unit="records", shown=shown) as bar:
        for found in map_in_order(partial(_hash_kept, selection=selection), batches, num_proc):
            smallest = np.unique(np.concatenate([smallest, found]))[:count]
            bar.advance(len(found))
    return smallest


def _hash_kept(records: Sequence[RawRecord], selection: Selection) -> np.ndarray:
    """Return the hashes of the records of a batch that the filter keeps, uint64."""
    hashes = []
    for record in records:
        try:
            parsed = parse_record(record.location, record.text)
            record_hash = hash_record(parsed)
            if selection.keeps(parsed, record.location):
                hashes.append(record_hash)
        except UserError:
            continue
    return np.array(hashes, np.uint64)
