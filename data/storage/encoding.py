"""From a batch of records to the columns of a tokenized folder, and counts of what became of the records."""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from data.encoders.length import LengthCounts, fit_pair, fit_sample
from data.encoders.segments import PieceEncoder, no_token_error, tokenize_pieces
from data.encoders.turns import TurnCounts, count_turns
from data.options import LengthPolicy, OnBadRecord
from data.sample import IGNORE_INDEX, Encoder, Pair, Sample, count_targets
from data.sources.formats import RawRecord
from data.sources.records import parse_record
from data.sources.selection import TAKE_ALL, Selection, hash_record
from data.storage.cache import compute_cache_key
from data.storage.summary import BatchCounts, sum_counts
from errors import UserError

_UNCUT = LengthCounts()


@dataclass(frozen=True)
class Encoding:
    """The settings that turn records into samples. max_seq_length: None keeps documents whole, to be cut where a row is
    full.

    samples_per_record: 2 where a record is a preference; then its samples follow each other, the chosen one
    first. selection: the records that are taken.
    """

    encoder: Encoder
    tokenizer: PreTrainedTokenizerBase
    max_seq_length: int | None
    length_policy: LengthPolicy = LengthPolicy.truncate
    on_bad_record: OnBadRecord = OnBadRecord.stop
    samples_per_record: int = 1
    selection: Selection = TAKE_ALL

    def compute_key(self, sources: Sequence[Sequence[str]]) -> str:
        """Return the name of the folder of these sources, see `compute_cache_key`."""
        options = {
            "max_seq_length": self.max_seq_length,
            "length_policy": self.length_policy.value,
            "on_bad_record": self.on_bad_record.value,
            "samples_per_record": self.samples_per_record,
            "selection": self.selection.describe(),
        }
        return compute_cache_key(sources, self.encoder, self.tokenizer, options)


@dataclass(frozen=True)
class EncodedBatch:
    """The samples of a batch of records. columns: input_ids and labels, the samples end to end, and length and
    num_targets of each; int32. Where the kind of data has it, `desirable`, 1 or 0. files: counts of each file by its
    number. hashes: of the records that became samples, or were dropped as too long, uint64."""

    columns: dict[str, np.ndarray]
    files: dict[int, BatchCounts]
    hashes: np.ndarray

    @property
    def counts(self) -> BatchCounts:
        """The counts of all files."""
        return sum_counts(self.files.values())


@dataclass
class _Record:
    """A record while it is encoded. counts: those of its file. turns: None where each target of its
    samples is a turn. num_before: runs of targets before the length policy cut them; None where it did not."""

    location: str
    counts: BatchCounts
    hash: int = 0
    turns: TurnCounts | None = None
    num_before: int | None = None


def encode_batch(records: Sequence[RawRecord], encoding: Encoding, files: Sequence[int] = ()) -> EncodedBatch:
    """Encode a batch of records. files: the number of the file of each; without them, all are of file 0. Raises
    UserError for a bad record, unless bad records are skipped."""
    per_file = {number: BatchCounts() for number in files or [0]}
    states = [_Record(raw.location, per_file[number]) for raw, number in zip(records, files or [0] * len(records))]
    input_ids, labels, lengths, num_targets, desirable = (array("i") for _ in range(5))
    encoded_records: list[_Record] = []
    record_numbers = array("i")  # of each sample, among `encoded_records`
    for record, encoded in _encode_records(records, states, encoding):
        limits = record.location, encoding.length_policy, encoding.max_seq_length
        try:
            fitted, length_counts = (
                fit_pair(encoded, *limits) if isinstance(encoded, tuple) else fit_sample(encoded, *limits)
            )
        except UserError as error:
            _handle_bad_record(error, encoding, record.counts)
            continue
        if length_counts != _UNCUT:
            record.counts.lengths.add(length_counts)
            record.num_before = sum(map(_count_spans, encoded if isinstance(encoded, tuple) else [encoded]))
        for piece in fitted:
            input_ids.fromlist(piece["input_ids"])
            labels.fromlist(piece["labels"])
            lengths.append(len(piece["input_ids"]))
            num_targets.append(count_targets(piece["labels"]))
            record_numbers.append(len(encoded_records))
            if isinstance(encoded, dict) and "desirable" in encoded:
                desirable.append(encoded["desirable"])
        encoded_records.append(record)
    columns = {"input_ids": input_ids, "labels": labels, "length": lengths, "num_targets": num_targets}
    if desirable:
        columns["desirable"] = desirable
    arrays = {name: np.array(values, np.int32) for name, values in columns.items()}
    _count_samples(encoded_records, np.array(record_numbers, np.int32), arrays)
    return EncodedBatch(arrays, per_file, np.array([record.hash for record in encoded_records], np.uint64))


def _count_samples(records: Sequence[_Record], numbers: np.ndarray, columns: dict[str, np.ndarray]) -> None:
    """Add the samples and turns of each record to the counts of its file. numbers: the record of each sample."""
    has_target = columns["labels"] != IGNORE_INDEX  # never on the first token of a sample
    begins = has_target & ~np.concatenate([[False], has_target[:-1]])
    firsts = np.cumsum(columns["length"]) - columns["length"]
    spans = np.add.reduceat(begins, firsts, dtype=np.int64) if len(firsts) else firsts
    amounts = (np.ones(len(numbers)), columns["length"], columns["num_targets"], spans)
    sums = [np.bincount(numbers, amount, len(records)).astype(int).tolist() for amount in amounts]
    for record, num_samples, num_tokens, num_targets, num_spans in zip(records, *sums, strict=True):
        counts = record.counts
        counts.num_samples += num_samples
        counts.num_tokens += num_tokens
        counts.num_targets += num_targets
        num_before = num_spans if record.num_before is None else record.num_before
        turns = record.turns or TurnCounts(num_turns=num_before)
        if turns.num_turns:
            counts.turns.add(turns)
            counts.turns.num_cut += max(0, num_before - num_spans)
            counts.turns.num_unshown += max(0, turns.num_turns - turns.num_marked - turns.num_earlier - num_before)


def _count_spans(sample: Sample) -> int:
    """Return the number of runs of targets in a sample, before it is cut."""
    has_target = np.array(sample["labels"]) != IGNORE_INDEX
    has_target[:1] = False  # nothing predicts the first token
    return int(np.count_nonzero(has_target[1:] & ~has_target[:-1]))


def _encode_records(
    records: Sequence[RawRecord], states: Sequence[_Record], encoding: Encoding
) -> Iterator[tuple[_Record, Sample | Pair]]:
    """Yield each readable record that is taken, and its sample or pair; those of a `PieceEncoder` are tokenized in one
    call."""
    encoder, tokenizer = encoding.encoder, encoding.tokenizer
    encode = encoder.split if isinstance(encoder, PieceEncoder) else encoder.encode
    encoded: list[Any] = []  # samples, or pieces to tokenize
    taken: list[_Record] = []
    for raw, record in zip(records, states, strict=True):
        try:
            parsed = _select_record(raw, encoding.selection, record)
            if parsed is None:
                continue
            made = encode(parsed, raw.location, tokenizer)
            if isinstance(made, tuple) != (encoding.samples_per_record == 2):
                raise UserError(
                    f"{raw.location}: the encoder must make a (chosen, rejected) of a record with data=preference, "
                    "and one sample otherwise"
                )
            encoded.append(made)
        except UserError as error:
            _handle_bad_record(error, encoding, record.counts)
            continue
        record.turns = count_turns(encoder, parsed)
        taken.append(record)
    unknown: dict[int, str] = {}
    samples: Sequence[Sample | Pair] = (
        _tokenize_encoded(encoded, tokenizer, unknown) if isinstance(encoder, PieceEncoder) else encoded
    )
    for number, sample in enumerate(samples):
        record = taken[number]
        if number in unknown:
            _handle_bad_record(no_token_error(unknown[number], record.location), encoding, record.counts)
            continue
        yield record, sample


def _select_record(raw: RawRecord, selection: Selection, record: _Record) -> dict | None:
    """Return the parsed record, None where it is not taken. Raises UserError for one that cannot be read."""
    counts = record.counts
    counts.num_read += 1
    counts.num_records += 1
    if raw.problem is not None:
        raise UserError(raw.problem)
    parsed = parse_record(raw.location, raw.text)
    record.hash = hash_record(parsed)
    is_taken = selection.takes(record.hash)
    if not is_taken and selection.takes_held_out:
        counts.num_records -= 1
        return None
    if not selection.keeps(parsed, raw.location):
        counts.num_filtered += 1
        return None
    counts.num_held_out += not is_taken
    return parsed if is_taken else None


def _tokenize_encoded(
    encoded: list, tokenizer: PreTrainedTokenizerBase, unknown: dict[int, str]
) -> Sequence[Sample | Pair]:
    """Return samples for lists of pieces, pairs for pairs of them. unknown: as in `tokenize_pieces`."""
    if not encoded or not isinstance(encoded[0], tuple):
        return tokenize_pieces(encoded, tokenizer, unknown)
    found: dict[int, str] = {}
    samples = tokenize_pieces([pieces for pair in encoded for pieces in pair], tokenizer, found)
    unknown.update({number // 2: text for number, text in found.items()})
    return list(zip(samples[::2], samples[1::2], strict=True))


def _handle_bad_record(error: UserError, encoding: Encoding, counts: BatchCounts) -> None:
    if encoding.on_bad_record is OnBadRecord.stop:
        raise error
    counts.add_skipped(str(error))
