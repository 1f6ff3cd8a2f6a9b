"""From a batch of records to the columns of a tokenized folder, and counts of what became of the records."""

import re
from array import array
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, pairwise
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np
import xxhash
from transformers import PreTrainedTokenizerBase

from data.counts import ContentCounts
from data.encoders.kinds import describe_encoder_code, find_own
from data.encoders.segments import CountingEncoder, PieceEncoder, Pieces, no_token_error, tokenize_pieces
from data.options import LengthPolicy, OnBadRecord
from data.sample import IGNORE_INDEX, Encoder, Group, Sample, count_targets
from data.sources.formats import RawRecord
from data.sources.records import parse_record
from data.sources.selection import TAKE_ALL, Selection, hash_record
from data.storage.cache import compute_cache_key, describe_sources
from data.storage.length import LengthCounts, fit_group, fit_samples
from data.storage.summary import BatchCounts, sum_counts
from data.storage.tokenized import (
    ATTACHED_COLUMN,
    ATTACHED_HASH_COLUMN,
    ATTACHED_LENGTH_COLUMN,
    CUT_COLUMN,
    LABEL_DTYPES,
    PLACE_COLUMN,
    PROMPT_COLUMN,
    write_attachments,
)
from errors import UserError

Encoded = Sample | list[Sample] | Group
_UNCUT = LengthCounts()


@dataclass(frozen=True)
class Encoding:
    """The settings that turn records into samples. max_seq_length: None keeps documents whole, to be cut where a row is
    full.

    samples_per_record: more than 1 where the samples of a record stay together; they then follow each other.
    shares_rows: whether they have at most `max_seq_length` tokens together. selection: the records that are taken.
    label_key, is_whole: as of `DataKind`.
    """

    encoder: Encoder
    tokenizer: PreTrainedTokenizerBase
    max_seq_length: int | None
    length_policy: LengthPolicy = LengthPolicy.truncate
    on_bad_record: OnBadRecord = OnBadRecord.stop
    samples_per_record: int = 1
    shares_rows: bool = False
    selection: Selection = TAKE_ALL
    label_key: str = ""
    is_whole: bool = False

    @property
    def attaches(self) -> bool:
        """Whether samples may have attachments."""
        return getattr(self.encoder, "attaches", False)

    def compute_key(self, sources: Sequence[Sequence[str]]) -> str:
        """Return the name of the folder of these sources, see `compute_cache_key`."""
        options = {
            "max_seq_length": self.max_seq_length,
            "length_policy": self.length_policy.value,
            "on_bad_record": self.on_bad_record.value,
            "samples_per_record": self.samples_per_record,
            "selection": self.selection.describe(),
            **({"shares_rows": True} if self.shares_rows else {}),
        }
        if self.attaches:
            encoder: Any = self.encoder
            options["attachments"] = encoder.describe_attachments(self.tokenizer)
        kind = find_own(self.encoder)
        if self.label_key != ("" if kind is None else kind.label_key):  # which the encoder's name does not imply
            options["label_key"] = self.label_key
        if self.is_whole != (kind is not None and kind.is_whole):
            options["is_whole"] = self.is_whole
        return compute_cache_key(sources, self.encoder, self.tokenizer, options)

    def describe_files(self, sources: Sequence[Sequence[str]]) -> list:
        """Return the state of all files that the tokens of these sources depend on."""
        return [describe_sources(sources), describe_encoder_code(self.encoder), self.selection.describe()]


class LabelKind(NamedTuple):
    """The form of the label of a sample. column: its file, empty without a label. size: numbers of it."""

    column: str
    size: int

    def __str__(self) -> str:
        names = {"": "none", "label": f"{self.size} int", "value": f"{self.size} float"}
        return names[self.column]


@dataclass(frozen=True)
class EncodedBatch:
    """The samples of a batch of records. columns: input_ids and labels, the samples end to end, and length,
    num_targets, num_cut and place in its file of each, and num_prompt where they are answers; int32. Where the kind of
    data has labels of samples, those of each, end to end: `label`, int32, or `value`, float64. Where its samples may
    have attachments, those of each, end to end: `attached`, uint8; their bytes, `attached_length`; and `attached_hash`,
    uint64. files: counts of each file by its number. hashes: of the records that became samples, or were dropped as too
    long, uint64. label_kinds: of its samples, at most one. skipped: the message of each record that was skipped as
    bad."""

    columns: dict[str, np.ndarray]
    files: dict[int, BatchCounts]
    hashes: np.ndarray
    label_kinds: frozenset[LabelKind] = frozenset()
    skipped: Sequence[str] = ()

    @property
    def counts(self) -> BatchCounts:
        """The counts of all files."""
        return sum_counts(self.files.values())


@dataclass
class _Record:
    """A record while it is encoded. counts: those of its file. skipped: the messages of its batch. content: its own,
    added to them once it is encoded."""

    location: str
    counts: BatchCounts
    skipped: list[str]
    content: ContentCounts = field(default_factory=ContentCounts)
    hash: int = 0


def encode_batch(records: Sequence[RawRecord], encoding: Encoding, files: Sequence[int] = ()) -> EncodedBatch:
    """Encode a batch of records. files: the number of the file of each; without them, all are of file 0. Raises
    UserError for a bad record, unless bad records are skipped."""
    per_file = {number: BatchCounts() for number in files or [0]}
    skipped: list[str] = []
    numbered = zip(records, files or [0] * len(records))
    states = [_Record(raw.location, per_file[number], skipped) for raw, number in numbered]
    input_ids, labels, lengths, num_targets, num_prompt, num_cut, places = (array("i") for _ in range(7))
    hashes: list[int] = []
    sample_labels: list[int | float] = []
    attached: list[bytes] = []
    attached_hashes: list[int] = []
    kinds: set[LabelKind] = set()
    for record, encoded in _encode_records(records, states, encoding):
        try:
            fitted = _fit(encoded, record, encoding)
        except UserError as error:
            _handle_bad_record(error, encoding, record)
            continue
        record.counts.content.add(record.content)
        record.counts.num_samples += len(fitted)
        for piece in fitted:
            input_ids.fromlist(piece["input_ids"])
            labels.fromlist(piece["labels"])
            lengths.append(len(piece["input_ids"]))
            places.append(_read_place(record.location))
            num_cut.append(piece.get("num_cut", 0))
            num_targets.append(count_targets(piece))
            if _holds_answers(encoded, encoding.label_key):
                num_prompt.append(piece["num_prompt"] if "num_prompt" in piece else _find_target(piece))
            if encoding.attaches:
                attached.append(write_attachments(piece.get("attachments", ())))
                attached_hashes.append(_hash_attachments(piece, encoding.encoder))
            record.counts.num_tokens += lengths[-1]
            record.counts.num_targets += num_targets[-1]
            found = _list_labels(encoded, encoding.label_key)
            sample_labels += found
            kinds.add(_find_label_kind(found))
        hashes.append(record.hash)
    columns = {"input_ids": input_ids, "labels": labels, "length": lengths, "num_targets": num_targets}
    columns |= {PLACE_COLUMN: places, CUT_COLUMN: num_cut}
    if num_prompt:
        columns[PROMPT_COLUMN] = num_prompt
    arrays = {name: np.array(values, np.int32) for name, values in columns.items()}
    if encoding.attaches:
        arrays[ATTACHED_COLUMN] = np.frombuffer(b"".join(attached), np.uint8)
        arrays[ATTACHED_LENGTH_COLUMN] = np.array([len(each) for each in attached], np.int32)
        arrays[ATTACHED_HASH_COLUMN] = np.array(attached_hashes, np.uint64)
    check_label_kinds(kinds, encoding.encoder)
    if sample_labels:
        ((name, _),) = kinds
        arrays[name] = np.array(sample_labels, LABEL_DTYPES[name])
    return EncodedBatch(arrays, per_file, np.array(hashes, np.uint64), frozenset(kinds), skipped)


def check_label_kinds(kinds: Collection[LabelKind], encoder: Encoder) -> None:
    """Raise UserError where the labels of samples are of several kinds, which have no column in common."""
    if len(kinds) > 1:
        one, other, *_ = sorted(kinds)
        name = f"{type(encoder).__module__}.{type(encoder).__qualname__}"
        raise UserError(
            f"data.encoder={name} gives some samples {one} as `label` and others {other}; give each as many, of one "
            "type"
        )


def _hash_attachments(sample: Sample, encoder: Any) -> int:
    """Return a hash of what the attachments of a sample are, wherever they lie."""
    identities = [(start, stop, encoder.identify(content)) for start, stop, content in sample.get("attachments", ())]
    return xxhash.xxh3_64_intdigest(repr(identities).encode())


def _holds_answers(encoded: Encoded, label_key: str) -> bool:
    """Return whether the samples of a record are answers to a prompt: those that stay together, and single ones with a
    label."""
    return "label" not in encoded[0] if isinstance(encoded, tuple) else label_key in encoded


def _read_place(location: str) -> int:
    """Return the number that a location ends with, of a line, a row or a record; 0 for a file that is one record."""
    number = re.search(r"(?<=[: ])\d+$", location)
    return int(number[0]) if number else 0


def _find_target(sample: Sample) -> int:
    return next(place for place, label in enumerate(sample["labels"]) if label != IGNORE_INDEX)


def _find_label_kind(labels: Sequence[int | float]) -> LabelKind:
    if not labels:
        return LabelKind("", 0)
    are_whole = all(isinstance(each, Integral | np.bool_) for each in labels)
    return LabelKind("label" if are_whole else "value", len(labels))


def _list_labels(encoded: Encoded, label_key: str) -> Sequence[int | float]:
    """Return the labels of a record's sample; empty for a kind of data that has none."""
    if not isinstance(encoded, dict):
        return ()
    if "label" in encoded:
        return encoded["label"]
    own: Mapping[str, Any] = encoded
    return [own[label_key]] if label_key in own else ()


def _fit(encoded: Encoded, record: _Record, encoding: Encoding) -> list[Sample]:
    """Return what the length policy makes of the samples of a record, and count it. Raises UserError as
    `fit_samples` and `fit_group` do."""
    limits = record.location, encoding.length_policy, encoding.max_seq_length
    if isinstance(encoded, tuple):
        samples, (fitted, counts) = list(encoded), fit_group(encoded, *limits, encoding.shares_rows)
    else:
        samples = encoded if isinstance(encoded, list) else [encoded]
        fitted, counts = fit_samples(samples, *limits)
    if len(samples) > 1 and not isinstance(encoded, tuple):
        record.content.add(_count_split(samples))
    if counts != _UNCUT:
        record.counts.lengths.add(counts)
        record.content.num_cut_turns = _count_cut_turns(samples, fitted, record.content)
    return fitted


def _count_cut_turns(samples: Sequence[Sample], fitted: Sequence[Sample], counts: ContentCounts) -> int:
    """Return how many target turns of a record are cut off whole: runs of targets that are gone, of which a turn with
    masked parts has several."""
    before, after = (sum(map(_count_runs, each)) for each in (samples, fitted))
    return min(max(0, before - after), counts.num_target_turns - counts.num_lost_turns)


def _count_runs(sample: Sample) -> int:
    """Return the number of runs of adjacent targets in a sample."""
    has_target = np.array(sample["labels"]) != IGNORE_INDEX
    has_target[:1] = False  # nothing predicts the first token
    return int(np.count_nonzero(has_target[1:] & ~has_target[:-1]))


def _encode_records(
    records: Sequence[RawRecord], states: Sequence[_Record], encoding: Encoding
) -> Iterator[tuple[_Record, Encoded]]:
    """Yield each readable record that is taken, and its samples; those of a `PieceEncoder` are tokenized in one
    call."""
    encoder, tokenizer = encoding.encoder, encoding.tokenizer
    encoded: list[Any] = []  # samples, or pieces to tokenize
    taken: list[_Record] = []
    for raw, record in zip(records, states, strict=True):
        try:
            parsed = _select_record(raw, encoding.selection, record)
            if parsed is None:
                continue
            made = _bind_counts(encoder, record.content)(parsed, raw.location, tokenizer)
            num_together = len(made) if isinstance(made, tuple) else 1
            if num_together != encoding.samples_per_record:
                raise UserError(
                    f"{raw.location}: the encoder must make {_describe_made(encoding.samples_per_record)} of a record, "
                    f"not {_describe_made(num_together)}"
                )
            encoded.append(tuple({"label": [], **sample} for sample in made) if encoding.is_whole else made)
        except UserError as error:
            _handle_bad_record(error, encoding, record)
            continue
        taken.append(record)
    unknown: dict[int, str] = {}
    splits = isinstance(encoder, PieceEncoder)
    samples: Sequence[Encoded] = _tokenize_encoded(encoded, tokenizer, unknown) if splits else encoded
    for number, (record, sample) in enumerate(zip(taken, samples, strict=True)):
        if number in unknown:
            _handle_bad_record(no_token_error(unknown[number], record.location), encoding, record)
            continue
        yield record, sample


def _describe_made(num_samples: int) -> str:
    return "one sample" if num_samples == 1 else f"a tuple of {num_samples}"


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


def _bind_counts(encoder: Encoder, counts: ContentCounts) -> Callable[..., Any]:
    """Return what makes samples or pieces of a record. User-defined encoders count nothing."""
    if isinstance(encoder, PieceEncoder):
        return partial(encoder.split, counts=counts)
    if isinstance(encoder, CountingEncoder):
        return partial(encoder.encode, counts=counts)
    return encoder.encode


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
    """Return the samples of each record, a tuple for a tuple of pieces. unknown: as in `tokenize_pieces`."""
    found: dict[int, str] = {}
    samples = iter(tokenize_pieces([pieces for record in encoded for pieces in record], tokenizer, found))
    owners = [number for number, record in enumerate(encoded) for _ in record]
    for place, text in found.items():
        unknown.setdefault(owners[place], text)
    made = [list(islice(samples, len(record))) for record in encoded]
    return [tuple(one) if isinstance(record, tuple) else one for one, record in zip(made, encoded)]


def _handle_bad_record(error: UserError, encoding: Encoding, record: _Record) -> None:
    if encoding.on_bad_record is OnBadRecord.stop:
        if not str(error).startswith(record.location):  # not of this record alone
            raise error
        raise UserError(f"{error} (data.on_bad_record=skip leaves such records out)")
    record.counts.add_skipped(str(error))
    record.skipped.append(str(error))
