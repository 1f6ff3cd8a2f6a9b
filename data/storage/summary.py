"""Counts of what tokenizing did with the records, so that nothing is lost silently.

Each file of a batch of records has its `BatchCounts`; at the end those of each file, and their sums, become one
`Summary`, stored next to the tokens for the log of later runs.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from data.encoders.length import LengthCounts
from data.encoders.turns import TurnCounts
from data.sources.selection import Selection
from errors import UserError

MAX_EXAMPLES = 3


@dataclass
class BatchCounts:
    """Counts of the records of one file in a batch, or of several. examples: messages of records that were skipped.

    num_read: records of the files. num_records: those that this part could take: of the held out part, its own.
    num_filtered, num_held_out, num_skipped: those of them that the filter rejects, that are left for the evaluation,
    and that are bad. num_targets: tokens, counted after the shift.
    """

    num_read: int = 0
    num_records: int = 0
    num_filtered: int = 0
    num_held_out: int = 0
    num_skipped: int = 0
    num_samples: int = 0
    num_tokens: int = 0
    num_targets: int = 0
    turns: TurnCounts = field(default_factory=TurnCounts)
    lengths: LengthCounts = field(default_factory=LengthCounts)
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
        self.turns.add(other.turns)
        self.lengths.add(other.lengths)
        self.examples = (self.examples + other.examples)[:MAX_EXAMPLES]

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> "BatchCounts":
        """Return the counts of which `asdict` made these fields. Raises KeyError or TypeError for others."""
        return cls(**fields | {"turns": TurnCounts(**fields["turns"]), "lengths": LengthCounts(**fields["lengths"])})


@dataclass(frozen=True)
class FileCounts:
    """The counts of a file, a data set of the hub, or a user-defined function. name: as a source is named, of a file
    its absolute path."""

    name: str
    counts: BatchCounts


@dataclass(frozen=True)
class Summary:
    """The contents of a tokenized folder, and counts of the records. fingerprints: a hash per entry of `train_file`.
    files: the same counts of each file, in the order of the samples."""

    num_samples: int
    num_tokens: int
    num_targets: int
    num_records: int
    num_skipped: int
    lengths: LengthCounts
    examples: list[str]
    fingerprints: list[str]
    num_filtered: int = 0
    num_held_out: int = 0
    files: list[FileCounts] = field(default_factory=list)

    def describe(self) -> str:
        parts = [f"{self.num_samples:,} samples, {self.num_tokens:,} tokens, {self.num_targets:,} target tokens"]
        if lengths := self.lengths.describe():
            parts.append(lengths)
        if self.num_skipped:
            parts.append(
                f"{self.num_skipped:,} of {self.num_records:,} records skipped as bad, such as {self.examples[0]}"
            )
        if self.num_filtered:
            parts.append(f"{self.num_filtered:,} records filtered out")
        if self.num_held_out:
            parts.append(f"{self.num_held_out:,} records held out for evaluation")
        return "; ".join(parts)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Summary":
        """Parse what `to_json` wrote. Raises ValueError, KeyError or TypeError for a damaged text."""
        fields = json.loads(text)
        files = [FileCounts(file["name"], BatchCounts.from_fields(file["counts"])) for file in fields["files"]]
        return cls(**fields | {"lengths": LengthCounts(**fields["lengths"]), "files": files})


def sum_counts(parts: Iterable[BatchCounts]) -> BatchCounts:
    """Return the sums of counts."""
    total = BatchCounts()
    for part in parts:
        total.add(part)
    return total


def check_any_taken(counts: BatchCounts, selection: Selection, key: str) -> None:
    """Raise UserError when the selection takes no record."""
    if selection.takes_held_out and not counts.num_records:
        assert selection.hold_out is not None
        raise UserError(
            f"{key}: none of its {counts.num_read:,} records is held out for evaluation; raise {selection.hold_out.key}"
        )
    if counts.num_filtered == counts.num_records:
        raise UserError(
            f"{key}: data.filter keeps none of its {counts.num_records:,} records; change the function or its fields"
        )
    if counts.num_filtered + counts.num_held_out == counts.num_records:
        assert selection.hold_out is not None
        raise UserError(
            f"{key}: all of its {counts.num_held_out:,} records are held out for evaluation; lower "
            f"{selection.hold_out.key}"
        )


def check_any_left(summary: Summary, key: str) -> None:
    """Raise UserError when every record was skipped or dropped."""
    if summary.num_samples == 0:
        reason = f"; the first: {summary.examples[0]}" if summary.examples else ""
        raise UserError(
            f"{key}: none of its {summary.num_records:,} records is left: {summary.num_skipped:,} skipped as bad,"
            f" {summary.lengths.num_dropped:,} dropped as too long{reason}; "
            "fix the data, data.length_policy or max_seq_length"
        )
