"""Counts of what tokenizing did with the records, so that nothing is lost silently.

Each file of a batch of records has its `BatchCounts`; at the end those of each file, and their sums, become one
`Summary`, stored next to the tokens for the screen of later runs.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from console import pluralize
from data.counts import ContentCounts
from data.sources.selection import Selection
from data.storage.length import LengthCounts
from errors import UserError

MAX_EXAMPLES = 3


@dataclass
class BatchCounts:
    """Counts of the records of one file in a batch, or of several. examples: messages of records that were skipped.

    num_read: records of the files. num_records: those that this part could take: of the held out part, its own.
    num_filtered, num_held_out, num_skipped: those of them that the filter rejects, that are left for the evaluation,
    and that are bad. num_targets: tokens, counted after the shift. content: of the records that were encoded.
    """

    num_read: int = 0
    num_records: int = 0
    num_filtered: int = 0
    num_held_out: int = 0
    num_skipped: int = 0
    num_samples: int = 0
    num_tokens: int = 0
    num_targets: int = 0
    lengths: LengthCounts = field(default_factory=LengthCounts)
    content: ContentCounts = field(default_factory=ContentCounts)
    examples: list[str] = field(default_factory=list)

    @property
    def num_encoded(self) -> int:
        """The records that became samples, or were dropped as too long."""
        return self.num_records - self.num_filtered - self.num_held_out - self.num_skipped

    def add_skipped(self, message: str) -> None:
        self.num_skipped += 1
        if len(self.examples) < MAX_EXAMPLES:
            self.examples.append(message)

    def add(self, other: "BatchCounts") -> None:
        for name, value in vars(other).items():
            if name.startswith("num_"):
                setattr(self, name, getattr(self, name) + value)
        self.lengths.add(other.lengths)
        self.content.add(other.content)
        self.examples = (self.examples + other.examples)[:MAX_EXAMPLES]

    def describe(self) -> str:
        """Return all counts in words, on several lines."""
        return "\n".join([f"{pluralize(self.num_records, 'record')}; {self.describe_size()}", *self.describe_fate()])

    def describe_size(self) -> str:
        """Return in words what the records became."""
        sizes = pluralize(self.num_samples, "sample"), pluralize(self.num_tokens, "token")
        return f"{', '.join(sizes)}, {self.num_targets:,} target {'token' if self.num_targets == 1 else 'tokens'}"

    def describe_fate(self) -> list[str]:
        """Return in words the turns, and what was changed or left out of the records, one line each."""
        lines = [*self.content.describe_turns(), *self.lengths.describe(), *self.content.describe()]
        if self.num_skipped:
            records = pluralize(self.num_records, "record")
            lines.append(f"{self.num_skipped:,} of {records} skipped as bad, such as {self.examples[0]}")
        if self.num_filtered:
            lines.append(pluralize(self.num_filtered, "record filtered out"))
        if self.num_held_out:
            lines.append(pluralize(self.num_held_out, "record held out for evaluation"))
        return lines


@dataclass(frozen=True)
class FileCounts:
    """The counts of a file, a data set of the hub, or a user-defined function. name: as a source is named, of a file
    its absolute path."""

    name: str
    counts: BatchCounts


@dataclass
class Summary(BatchCounts):
    """The contents of a tokenized folder, and the counts of all records. fingerprints: a hash per entry of
    `train_file`. files: the same counts of each file, in the order of the samples."""

    fingerprints: list[str] = field(default_factory=list)
    files: list[FileCounts] = field(default_factory=list)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Summary":
        """Parse what `to_json` wrote. Raises ValueError, KeyError or TypeError for a damaged text."""
        fields = json.loads(text)
        files = [FileCounts(file["name"], BatchCounts(**_parse_counts(file["counts"]))) for file in fields["files"]]
        return cls(**_parse_counts(fields) | {"files": files})


def _parse_counts(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of counts that `asdict` made. Raises KeyError or TypeError for others."""
    parsed = {"lengths": LengthCounts(**fields["lengths"]), "content": ContentCounts(**fields["content"])}
    return fields | parsed


def sum_counts(parts: Iterable[BatchCounts]) -> BatchCounts:
    """Return the sums of counts."""
    total = BatchCounts()
    for part in parts:
        total.add(part)
    return total


def sum_files(files: list[FileCounts], fingerprints: list[str]) -> Summary:
    """Return the summary of files with these counts."""
    counts = sum_counts(file.counts for file in files)
    return Summary(**vars(counts), fingerprints=fingerprints, files=files)


def check_any_taken(counts: BatchCounts, selection: Selection, key: str) -> None:
    """Raise UserError when the selection takes no record."""
    if selection.takes_held_out and not counts.num_records:
        assert selection.hold_out is not None
        raise UserError(
            f"{key}: none of its {pluralize(counts.num_read, 'record')} is held out for evaluation; raise "
            f"{selection.hold_out.key}"
        )
    if counts.num_filtered == counts.num_records:
        raise UserError(
            f"{key}: data.filter keeps none of its {pluralize(counts.num_records, 'record')}; change the "
            "function or its fields"
        )
    if counts.num_filtered + counts.num_held_out == counts.num_records:
        assert selection.hold_out is not None
        raise UserError(
            f"{key}: all of its {pluralize(counts.num_held_out, 'record')} would be held out for evaluation; lower "
            f"{selection.hold_out.key}"
        )


def check_any_left(summary: Summary, key: str) -> None:
    """Raise UserError when every record was skipped or dropped."""
    if summary.num_samples == 0:
        reason = f"; the first: {summary.examples[0]}" if summary.examples else ""
        raise UserError(
            f"{key}: none of its {pluralize(summary.num_records, 'record')} is left: {summary.num_skipped:,} "
            "skipped as bad,"
            f" {summary.lengths.num_dropped:,} dropped as too long{reason}; "
            "fix the data, data.length_policy or max_seq_length"
        )
