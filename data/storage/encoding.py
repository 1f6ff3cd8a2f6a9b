"""From a batch of records to the columns of a tokenized folder."""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from data.encoders.length import fit_pair, fit_sample
from data.encoders.segments import PieceEncoder, no_token_error, tokenize_pieces
from data.options import LengthPolicy, OnBadRecord
from data.sample import Encoder, Pair, Sample, count_targets
from data.sources.formats import RawRecord
from data.sources.records import parse_record
from data.sources.selection import TAKE_ALL, Selection, hash_record
from data.storage.cache import compute_cache_key
from data.storage.summary import BatchCounts
from errors import UserError


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
    num_targets of each; int32. Where the kind of data has it, `desirable`, 1 or 0."""

    columns: dict[str, np.ndarray]
    counts: BatchCounts


def encode_batch(records: Sequence[RawRecord], encoding: Encoding) -> EncodedBatch:
    """Encode a batch of records. Raises UserError for a bad record, unless bad records are skipped."""
    counts = BatchCounts(num_read=len(records))
    input_ids, labels, lengths, num_targets, desirable = (array("i") for _ in range(5))
    for location, encoded in _encode_records(records, encoding, counts):
        limits = location, encoding.length_policy, encoding.max_seq_length
        try:
            fitted, length_counts = (
                fit_pair(encoded, *limits) if isinstance(encoded, tuple) else fit_sample(encoded, *limits)
            )
        except UserError as error:
            _handle_bad_record(error, encoding, counts)
            continue
        counts.lengths.add(length_counts)
        for piece in fitted:
            input_ids.fromlist(piece["input_ids"])
            labels.fromlist(piece["labels"])
            lengths.append(len(piece["input_ids"]))
            num_targets.append(count_targets(piece["labels"]))
            if isinstance(encoded, dict) and "desirable" in encoded:
                desirable.append(encoded["desirable"])
    columns = {"input_ids": input_ids, "labels": labels, "length": lengths, "num_targets": num_targets}
    if desirable:
        columns["desirable"] = desirable
    return EncodedBatch({name: np.array(values, np.int32) for name, values in columns.items()}, counts)


def _encode_records(
    records: Sequence[RawRecord], encoding: Encoding, counts: BatchCounts
) -> Iterator[tuple[str, Sample | Pair]]:
    """Yield (location, sample or pair) of each readable record; those of a `PieceEncoder` are tokenized in one call."""
    encoder, tokenizer = encoding.encoder, encoding.tokenizer
    encode = encoder.split if isinstance(encoder, PieceEncoder) else encoder.encode
    encoded: list[Any] = []  # samples, or pieces to tokenize
    locations = []
    for record in records:
        try:
            parsed = _select_record(record, encoding.selection, counts)
            if parsed is None:
                continue
            made = encode(parsed, record.location, tokenizer)
            if isinstance(made, tuple) != (encoding.samples_per_record == 2):
                raise UserError(
                    f"{record.location}: the encoder must make a (chosen, rejected) of a record with data=preference, "
                    "and one sample otherwise"
                )
            encoded.append(made)
        except UserError as error:
            _handle_bad_record(error, encoding, counts)
            continue
        locations.append(record.location)
    unknown: dict[int, str] = {}
    samples: Sequence[Sample | Pair] = (
        _tokenize_encoded(encoded, tokenizer, unknown) if isinstance(encoder, PieceEncoder) else encoded
    )
    for number, sample in enumerate(samples):
        if number in unknown:
            _handle_bad_record(no_token_error(unknown[number], locations[number]), encoding, counts)
            continue
        yield locations[number], sample


def _select_record(record: RawRecord, selection: Selection, counts: BatchCounts) -> dict | None:
    """Return the parsed record, None where it is not taken. Raises UserError for one that cannot be read."""
    if record.problem is not None:
        counts.num_records += 1
        raise UserError(record.problem)
    try:
        parsed = parse_record(record.location, record.text)
    except UserError:
        counts.num_records += 1
        raise
    is_taken = selection.takes(hash_record(parsed))
    if not is_taken and selection.takes_held_out:
        return None
    counts.num_records += 1
    if not selection.keeps(parsed, record.location):
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
