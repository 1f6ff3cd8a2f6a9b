"""From files to a tokenized folder, once.

`prepare_dataset` writes `cache_dir/KEY`, which `data/tokenized.py` reads. A second run finds it and starts at once; of two
processes at once one works and the other waits. The folder appears whole, by a rename, or not at all; one that was damaged
since is noticed and made again.
"""

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import datasets
import numpy as np
import pyarrow
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from data.cache import compute_cache_key, lock_folder
from data.length import LengthPolicy, fit_pair, fit_sample
from data.records import parse_record, read_records, resolve_sources
from data.sample import Encoder, Pair, Sample, count_targets
from data.segments import PieceEncoder, tokenize_pieces
from data.summary import BatchCounts, Summary, check_any_left, load_counts
from data.tokenized import SIZES_FILE, SUMMARY_FILE, TOKENIZED_FEATURES, find_damage, load_summary
from errors import UserError

COUNTS_FILE = "counts.jsonl"
RAW_SCHEMA = pyarrow.schema(
    {"location": pyarrow.string(), "text": pyarrow.string(), "problem": pyarrow.string(), "source": pyarrow.int32()}
)
# A batch of records ends at whichever comes first; a record may be a whole book.
MAX_BATCH_RECORDS, MAX_BATCH_CHARACTERS = 1000, 2**24


class OnBadRecord(StrEnum):
    """`stop` ends the run with the record's place and problem; `skip` leaves it out and counts it."""

    STOP = "stop"
    SKIP = "skip"


@dataclass(frozen=True)
class Encoding:
    """How records become samples. max_seq_length: None keeps documents whole, to be cut where a row is full.

    samples_per_record: 2 where a record is a preference; then its samples lie one behind the other, the chosen one first.
    """

    encoder: Encoder
    tokenizer: PreTrainedTokenizerBase
    max_seq_length: int | None
    length_policy: LengthPolicy = LengthPolicy.TRUNCATE
    on_bad_record: OnBadRecord = OnBadRecord.STOP
    samples_per_record: int = 1

    def compute_key(self, sources: Sequence[Sequence[str]]) -> str:
        options = {
            "max_seq_length": self.max_seq_length,
            "length_policy": str(self.length_policy),
            "on_bad_record": str(self.on_bad_record),
            "samples_per_record": self.samples_per_record,
        }
        return compute_cache_key(sources, self.encoder, self.tokenizer, options)


def prepare_dataset(
    entries: Sequence[str],
    *,
    key: str,
    encoding: Encoding,
    cache_dir: str | Path,
    num_proc: int = 1,
    log: Callable[[str], None] | None = print,
) -> Path:
    """Tokenize the files unless that is done already, and return the folder for `TokenizedDataset`.

    entries: paths, globs, `hf:NAME`; a sample's `source` is the place of its entry.
    `key` is the config key of the files (`train_file`, `eval_file`), named by errors and by the line that is logged.
    log: None on a rank that keeps quiet.
    Raises `UserError` for whatever is wrong with the files or a record.
    """
    say = log or (lambda text: None)
    sources = [resolve_sources(entry, key) for entry in entries] or [resolve_sources([], key)]
    path = Path(cache_dir) / encoding.compute_key(sources)
    origin = "cached in"
    if find_damage(path) is not None:
        with lock_folder(path, say):
            damage = find_damage(path)  # another process may have made it while this one waited
            if damage is not None:
                if path.exists():
                    say(f"{key}: the tokenized data in {path} is damaged ({damage}); it is made again")
                    shutil.rmtree(path)
                _write_dataset(path, sources, key, encoding, num_proc)
                origin = "tokenized into"
    say(f"{key}: {load_summary(path).describe()}; {origin} {path}")
    return path


def _write_dataset(path: Path, sources: list[list[str]], key: str, encoding: Encoding, num_proc: int) -> None:
    temporary = path.with_suffix(".tmp")
    # One that exists is of a process that was killed: the lock says that nobody else writes here.
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        with _quiet_progress_bars():
            _tokenize_sources(temporary, sources, key, encoding, num_proc)
        os.rename(temporary / "final", path)
    except Exception as error:
        user_error = _find_user_error(error)
        if user_error is None:
            raise
        raise user_error from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _tokenize_sources(folder: Path, sources: list[list[str]], key: str, encoding: Encoding, num_proc: int) -> None:
    """Leave the finished dataset in `folder/final`; what `datasets` caches on the way lies in `folder` too."""
    _write_records(folder / "raw.arrow", sources, key)
    raw = Dataset.from_file(str(folder / "raw.arrow"))
    processes = min(num_proc, len(raw))
    tokenized = raw.map(
        _tokenize_batch,
        batched=True,
        remove_columns=raw.column_names,
        features=TOKENIZED_FEATURES,
        fn_kwargs={"encoding": encoding, "counts_file": folder / COUNTS_FILE},
        num_proc=processes if processes > 1 else None,
        cache_file_name=str(folder / "tokenized.arrow"),
        new_fingerprint="tokenized",  # nothing is looked up by it, and hashing a tokenizer takes seconds
        desc=f"Tokenizing {key}",
    )
    summary = _summarize(tokenized, load_counts(folder / COUNTS_FILE))
    check_any_left(summary, key)
    final = folder / "final"
    tokenized.save_to_disk(final)
    (final / SUMMARY_FILE).write_text(summary.to_json())
    sizes = {file.name: file.stat().st_size for file in sorted(final.iterdir())}
    (final / SIZES_FILE).write_text(json.dumps(sizes))


def _write_records(path: Path, sources: list[list[str]], key: str) -> None:
    """All records into one Arrow file, to be read by as many processes as there are.

    Not through `Dataset.from_generator`, which handles one example at a time and costs a fifth of the whole.
    """
    num_records = 0
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, RAW_SCHEMA) as writer:
        for batch in _batch_records(sources):
            writer.write_batch(pyarrow.RecordBatch.from_pylist(batch, RAW_SCHEMA))
            num_records += len(batch)
    if num_records == 0:
        files = ", ".join(source for group in sources for source in group)
        raise UserError(f"{key} holds no records ({files}); give a file that does")


def _batch_records(sources: list[list[str]]) -> Iterator[list[dict]]:
    batch: list[dict] = []
    num_characters = 0
    for number, group in enumerate(sources):
        for source in group:
            for record in read_records(source):
                batch.append({**vars(record), "source": number})
                num_characters += len(record.text)
                if len(batch) == MAX_BATCH_RECORDS or num_characters >= MAX_BATCH_CHARACTERS:
                    yield batch
                    batch, num_characters = [], 0
    if batch:
        yield batch


def _tokenize_batch(rows: dict[str, list], encoding: Encoding, counts_file: Path) -> dict[str, list]:
    counts = BatchCounts(num_records=len(rows["location"]))
    samples: list[Sample] = []
    samples_of: list[int] = []
    for location, encoded, source in _encode_batch(rows, encoding, counts):
        fit = fit_pair if isinstance(encoded, tuple) else fit_sample
        try:
            fitted, lengths = fit(encoded, location, encoding.length_policy, encoding.max_seq_length)
        except UserError as error:
            _handle_bad_record(error, encoding, counts)
            continue
        counts.lengths.add(lengths)
        samples += fitted
        samples_of += [source] * len(fitted)
    counts.append_to(counts_file)
    return {
        "input_ids": [sample["input_ids"] for sample in samples],
        "labels": [sample["labels"] for sample in samples],
        "length": [len(sample["input_ids"]) for sample in samples],
        "num_targets": [count_targets(sample["labels"]) for sample in samples],
        "source": samples_of,
    }


def _encode_batch(rows: dict[str, list], encoding: Encoding, counts: BatchCounts) -> Iterator[tuple[str, Sample | Pair, int]]:
    """(location, sample or pair, source) of the records that can be read; a `PieceEncoder`'s are tokenized in one call."""
    encoder, tokenizer = encoding.encoder, encoding.tokenizer
    encode = encoder.split if isinstance(encoder, PieceEncoder) else encoder.encode
    encoded, places = [], []
    for location, text, problem, source in zip(rows["location"], rows["text"], rows["problem"], rows["source"]):
        try:
            if problem is not None:
                raise UserError(problem)
            made = encode(parse_record(location, text), location, tokenizer)
            if isinstance(made, tuple) != (encoding.samples_per_record == 2):
                raise UserError(f"{location}: the encoder must make a (chosen, rejected) of a record with data=preference, and one sample otherwise")
            encoded.append(made)
        except UserError as error:
            _handle_bad_record(error, encoding, counts)
            continue
        places.append((location, source))
    samples = _tokenize_encoded(encoded, tokenizer) if isinstance(encoder, PieceEncoder) else encoded
    return ((location, sample, source) for (location, source), sample in zip(places, samples, strict=True))


def _tokenize_encoded(encoded: list, tokenizer: PreTrainedTokenizerBase) -> list[Sample | Pair]:
    """Samples of pieces, and pairs of pairs of pieces."""
    if not encoded or not isinstance(encoded[0], tuple):
        return tokenize_pieces(encoded, tokenizer)
    samples = tokenize_pieces([pieces for pair in encoded for pieces in pair], tokenizer)
    return list(zip(samples[::2], samples[1::2], strict=True))


def _handle_bad_record(error: UserError, encoding: Encoding, counts: BatchCounts) -> None:
    if encoding.on_bad_record is OnBadRecord.STOP:
        raise error
    counts.add_skipped(str(error))


def _summarize(tokenized: Dataset, counts: BatchCounts) -> Summary:
    def total(column: str) -> int:
        return int(tokenized.data.column(column).to_numpy().sum(dtype=np.int64))

    return Summary(
        num_samples=len(tokenized),
        num_tokens=total("length"),
        num_targets=total("num_targets"),
        num_records=counts.num_records,
        num_skipped=counts.num_skipped,
        lengths=counts.lengths,
        examples=counts.examples,
    )


def _find_user_error(error: BaseException | None) -> UserError | None:
    """`datasets` wraps what its generators and processes raise; the message for the user is down the chain."""
    while error is not None and not isinstance(error, UserError):
        error = error.__cause__ or error.__context__
    return error


@contextmanager
def _quiet_progress_bars() -> Iterator[None]:
    """No bars in log files; those of a terminal stay."""
    silence = not sys.stderr.isatty() and not datasets.are_progress_bars_disabled()
    if silence:
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        if silence:
            datasets.enable_progress_bars()
