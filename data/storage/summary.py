"""Counts of what tokenizing did with the records, so that nothing is lost silently.

Each batch of records has its `BatchCounts`; at the end they become one `Summary`, stored next to the tokens for the
log of later runs.
"""

import json
from dataclasses import asdict, dataclass, field

from data.counts import ContentCounts
from data.encoders.length import LengthCounts
from data.sources.selection import Selection
from errors import UserError

MAX_EXAMPLES = 3


@dataclass
class BatchCounts:
    """Counts of one batch of records. examples: messages of records that were skipped.

    num_read: records of the files. num_records: those that this part could take: of the held out part, its own.
    num_filtered, num_held_out, num_skipped: those of them that the filter rejects, that are left for the evaluation,
    and that are bad.
    """

    num_read: int = 0
    num_records: int = 0
    num_filtered: int = 0
    num_held_out: int = 0
    num_skipped: int = 0
    lengths: LengthCounts = field(default_factory=LengthCounts)
    content: ContentCounts = field(default_factory=ContentCounts)
    examples: list[str] = field(default_factory=list)

    def add_skipped(self, message: str) -> None:
        self.num_skipped += 1
        if len(self.examples) < MAX_EXAMPLES:
            self.examples.append(message)

    def add(self, other: "BatchCounts") -> None:
        self.num_read += other.num_read
        self.num_records += other.num_records
        self.num_filtered += other.num_filtered
        self.num_held_out += other.num_held_out
        self.num_skipped += other.num_skipped
        self.lengths.add(other.lengths)
        self.content.add(other.content)
        self.examples = (self.examples + other.examples)[:MAX_EXAMPLES]


@dataclass(frozen=True)
class Summary:
    """The contents of a tokenized folder, and counts of the records. fingerprints: a hash per entry of `train_file`."""

    num_samples: int
    num_tokens: int
    num_targets: int
    num_records: int
    num_skipped: int
    lengths: LengthCounts
    content: ContentCounts
    examples: list[str]
    fingerprints: list[str]
    num_filtered: int = 0
    num_held_out: int = 0

    def describe(self) -> str:
        parts = [f"{self.num_samples:,} samples, {self.num_tokens:,} tokens, {self.num_targets:,} target tokens"]
        if lengths := self.lengths.describe():
            parts.append(lengths)
        parts += self.content.describe()
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
        counts = {
            "lengths": LengthCounts(**fields["lengths"]),
            "content": ContentCounts(**fields["content"]),
        }
        return cls(**fields | counts)


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
