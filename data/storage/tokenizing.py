"""From files to a tokenized folder, once.

`prepare_dataset` writes `cache_dir/KEY`, which `data/storage/tokenized.py` reads. A second run finds it and starts at
once; of two processes at once one works and the other waits. The folder appears whole, by a rename, or not at all; one
that was damaged since is detected and rebuilt.

This process reads the files and writes the folder; worker processes encode the records. A few batches are in flight at
any time, so memory does not grow with the data, and nothing is written twice.
"""

import errno
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path

from console import pluralize, progress
from data.sources.formats import RawRecord
from data.sources.records import read_records, resolve_sources
from data.storage.cache import lock_folder
from data.storage.disk import check_room, describe_bytes, estimate_size
from data.storage.encoding import EncodedBatch, Encoding, LabelKind, check_label_kinds, encode_batch
from data.storage.held_out import list_smallest_hashes
from data.storage.indexed import holds_indexed, write_indexed
from data.storage.summary import BatchCounts, FileCounts, check_any_left, check_any_taken, sum_files
from data.storage.tokenized import TokenizedWriter, find_damage
from data.storage.workers import map_in_order
from errors import Ending, UserError
from filesystem import discard_folder, make_temporary, publish_folder
from masking import mask_text

# A batch of records ends at the first of these limits; a record may be a whole book.
MAX_BATCH_RECORDS, MAX_BATCH_CHARACTERS = 1000, 2**22
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


def prepare_dataset(
    entries: Sequence[str],
    *,
    key: str,
    encoding: Encoding,
    cache_dir: str | Path,
    num_proc: int = 1,
    log: Callable[[str], None] | None = print,
    compares_bytes: bool = True,
) -> Path:
    """Tokenize the files unless that is done already, and return the folder for `TokenizedDataset`.

    entries: paths, globs, `hf:NAME`; a sample's `source` is the place of its entry.
    `key` is the config key of the files (`train_file`, `eval_file`), named by errors and by the lines that are logged.
    log: None on a rank that does not log. compares_bytes: of a cached folder; else it is taken by its sizes.
    Raises `UserError` for whatever is wrong with the files or a record, and for a disk without room.
    """
    say = log or (lambda text: None)
    sources = [resolve_sources(entry, key) for entry in entries] or [resolve_sources([], key)]
    path = Path(cache_dir) / encoding.compute_key(sources)
    origin = "cached in"
    if find_damage(path, compares_bytes) is not None:
        with lock_folder(path, say):
            damage = find_damage(path, compares_bytes)  # another process may have made it while this one waited
            if damage is not None:
                if path.exists():
                    say(f"{key}: the tokenized data in {path} is damaged ({damage}); it is rebuilt")
                    discard_folder(path)
                _write_dataset(path, sources, key, encoding, num_proc=num_proc, say=say, shown=log is not None)
                origin = "tokenized into"
    say(f"{key}: {origin} {path}")
    return path


def _write_dataset(
    path: Path,
    sources: list[list[str]],
    key: str,
    encoding: Encoding,
    *,
    num_proc: int,
    say: Callable[[str], None],
    shown: bool,
) -> None:
    temporary = make_temporary(path)  # the lock ensures that no other process of this host writes there
    given, before = encoding, encoding.describe_files(sources)
    try:
        if holds_indexed(sources, key, encoding):
            write_indexed(temporary, sources, key, encoding, shown)
        else:
            encoding = _resolve_selection(sources, key, encoding, num_proc=num_proc, shown=shown)
            num_records = _announce(path.parent, sources, key, encoding, say=say)
            _tokenize_sources(
                temporary, sources, key, encoding, num_proc=num_proc, num_records=num_records, shown=shown
            )
        if given.describe_files(sources) != before:
            raise UserError(
                f"{key}: a file changed while it was tokenized, one of the records or one that code or a field of "
                "data.encoder or data.filter names; start again once it no longer changes. If it is one that they "
                "write, pass its folder, and put its name together in the code"
            )
        publish_folder(temporary, path)
    except UserError as error:
        raise error from None  # without the stack trace of another process
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        raise UserError(
            f"{key}: the disk that holds {path.parent} is full; make room, or choose another folder with "
            "data.cache_dir",
            Ending.DISK,
        ) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _resolve_selection(
    sources: list[list[str]], key: str, encoding: Encoding, *, num_proc: int, shown: bool
) -> Encoding:
    """Return the encoding with the bound of what is held out, for which all records may have to be read."""
    selection = encoding.selection
    batches = (batch.records for batch in _batch_sources(sources, selection.max_records))
    find = partial(list_smallest_hashes, batches=batches, selection=selection, key=key, num_proc=num_proc, shown=shown)
    return replace(encoding, selection=selection.resolve(find))


def _announce(
    folder: Path, sources: list[list[str]], key: str, encoding: Encoding, *, say: Callable[[str], None]
) -> int | None:
    """Log the estimated size, and return the estimated number of records, None if unknown. Raises UserError when the
    disk has no room.
    """
    estimate = estimate_size(sources, encoding)
    if estimate is None:
        say(f"{key}: tokenizing; how much disk it will need in {folder} is not known beforehand")
        return None
    free = check_room(estimate.num_bytes, folder, key)
    say(
        f"{key}: tokenizing about {pluralize(estimate.num_records, 'record')}; "
        f"they will need about {describe_bytes(estimate.num_bytes)} of disk in {folder}"
        f" ({describe_bytes(free)} are free)"
    )
    return estimate.num_records


def _tokenize_sources(
    folder: Path,
    sources: list[list[str]],
    key: str,
    encoding: Encoding,
    *,
    num_proc: int,
    num_records: int | None,
    shown: bool,
) -> None:
    names = [source for group in sources for source in group]
    files = [
        FileCounts(os.path.abspath(name) if os.path.exists(name) else mask_text(name), BatchCounts()) for name in names
    ]
    with (
        TokenizedWriter(folder, len(sources)) as writer,
        progress(f"tokenizing {key}", num_records, "records", shown) as bar,
    ):
        kinds: set[LabelKind] = set()
        for number, batch in _encode_sources(sources, encoding, num_proc):
            kinds |= batch.label_kinds
            check_label_kinds(kinds, encoding.encoder)
            writer.append(batch.columns, number)
            writer.append_hashes(batch.hashes)
            writer.append_skipped(batch.skipped)
            for file, found in batch.files.items():
                files[file].counts.add(found)
            bar.advance(batch.counts.num_read)
        summary = sum_files(files, writer.fingerprints)
        if summary.num_read == 0:
            raise UserError(f"{key} holds no records ({', '.join(names)}); give a file that does")
        check_any_taken(summary, encoding.selection, key)
        check_any_left(summary, key)
        writer.finish(summary)


def _encode_sources(sources: list[list[str]], encoding: Encoding, num_proc: int) -> Iterator[tuple[int, EncodedBatch]]:
    """Yield (number of the entry, batch) in the order of the records."""
    batches = _batch_sources(sources, encoding.selection.max_records)
    return map_in_order(partial(_encode_numbered, encoding=encoding), batches, num_proc)


@dataclass
class _RecordBatch:
    """Records of one entry. files: the number of the file of each, counted over all entries."""

    entry: int
    records: list[RawRecord] = field(default_factory=list)
    files: list[int] = field(default_factory=list)
    num_characters: int = 0

    @property
    def is_full(self) -> bool:
        return len(self.records) == MAX_BATCH_RECORDS or self.num_characters >= MAX_BATCH_CHARACTERS


def _encode_numbered(batch: _RecordBatch, encoding: Encoding) -> tuple[int, EncodedBatch]:
    return batch.entry, encode_batch(batch.records, encoding, batch.files)


def _batch_sources(sources: list[list[str]], most: int | None) -> Iterator[_RecordBatch]:
    """Yield the batches of all entries. most: records of each entry that are read."""
    first_file = 0
    for entry, group in enumerate(sources):
        numbered = enumerate(group, start=first_file)
        records = ((file, record) for file, source in numbered for record in read_records(source))
        batch = _RecordBatch(entry)
        for file, record in islice(records, most):
            batch.records.append(record)
            batch.files.append(file)
            batch.num_characters += len(record.text)
            if batch.is_full:
                yield batch
                batch = _RecordBatch(entry)
        if batch.records:
            yield batch
        first_file += len(group)
