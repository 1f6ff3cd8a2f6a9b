"""From a batch of records to the columns of a tokenized folder."""

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, pairwise
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from data.counts import ContentCounts
from data.encoders.length import fit_pair, fit_samples
from data.encoders.segments import PieceEncoder, Pieces, no_token_error, tokenize_pieces
from data.encoders.unpaired import UnpairedEncoder
from data.options import LengthPolicy, OnBadRecord
from data.sample import Encoder, Pair, Sample, count_targets
from data.sources.formats import RawRecord
from data.sources.records import parse_record
from data.sources.selection import TAKE_ALL, Selection, hash_record
from data.storage.cache import compute_cache_key
from data.storage.summary import BatchCounts
from errors import UserError

Encoded = Sample | list[Sample] | Pair


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
                fit_pair(encoded, *limits)
                if isinstance(encoded, tuple)
                else fit_samples(_list_samples(encoded), *limits)
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
) -> Iterator[tuple[str, Encoded]]:
    """Yield (location, samples or pair) of each readable record; those of a `PieceEncoder` are tokenized in one
    call."""
    encoder, tokenizer = encoding.encoder, encoding.tokenizer
    splits = isinstance(encoder, PieceEncoder)
    encode = _bind_counts(encoder, counts)
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
    samples: Sequence[Encoded] = _tokenize_encoded(encoded, tokenizer, unknown) if splits else encoded
    for number, sample in enumerate(samples):
        if number in unknown:
            _handle_bad_record(no_token_error(unknown[number], locations[number]), encoding, counts)
            continue
        if isinstance(sample, list) and len(sample) > 1:
            counts.content.add(_count_split(sample))
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


def _bind_counts(encoder: Encoder, counts: BatchCounts) -> Callable[..., Any]:
    """Return what makes samples or pieces of a record. User-defined encoders count nothing."""
    if isinstance(encoder, PieceEncoder):
        return partial(encoder.split, counts=counts.content)
    if isinstance(encoder, UnpairedEncoder):
        return partial(encoder.encode, counts=counts.content)
    return encoder.encode


def _list_samples(encoded: Sample | list[Sample]) -> list[Sample]:
    return encoded if isinstance(encoded, list) else [encoded]


def _count_split(samples: Sequence[Sample]) -> ContentCounts:
    """Return the counts of a record that became several samples, with the tokens that each shares with the last."""
    ids = [np.array(sample["input_ids"]) for sample in samples]
    repeated = 0
    for one, two in pairwise(ids):
        length = min(len(one), len(two))
        differs = np.flatnonzero(one[:length] != two[:length])
        repeated += int(differs[0]) if len(differs) else length
    return ContentCounts(num_split=1, num_extra_samples=len(samples) - 1, num_repeated_tokens=repeated)


def _tokenize_encoded(
    encoded: Sequence[Sequence[Pieces]], tokenizer: PreTrainedTokenizerBase, unknown: dict[int, str]
) -> Sequence[Encoded]:
    """Return the samples of each record, a pair for a pair of pieces. unknown: as in `tokenize_pieces`."""
    found: dict[int, str] = {}
    samples = iter(tokenize_pieces([pieces for record in encoded for pieces in record], tokenizer, found))
    owners = [number for number, record in enumerate(encoded) for _ in record]
    for place, text in found.items():
        unknown.setdefault(owners[place], text)
    made = [list(islice(samples, len(record))) for record in encoded]
    return [(one[0], one[1]) if isinstance(record, tuple) else one for one, record in zip(made, encoded)]


def _handle_bad_record(error: UserError, encoding: Encoding, counts: BatchCounts) -> None:
    if encoding.on_bad_record is OnBadRecord.stop:
        raise error
    counts.add_skipped(str(error))
