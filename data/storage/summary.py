"""Counts of what tokenizing did with the records, so that nothing is lost silently.

Each batch of records has its `BatchCounts`; at the end they become one `Summary`, stored next to the tokens for the
log of later runs.
"""

import json
from dataclasses import asdict, dataclass, field

from data.counts import ContentCounts
from data.encoders.length import LengthCounts
from errors import UserError

MAX_EXAMPLES = 3


@dataclass
class BatchCounts:
    """Counts of one batch of records. examples: messages of records that were skipped."""

    num_records: int = 0
    num_skipped: int = 0
    lengths: LengthCounts = field(default_factory=LengthCounts)
    content: ContentCounts = field(default_factory=ContentCounts)
    examples: list[str] = field(default_factory=list)

    def add_skipped(self, message: str) -> None:
        self.num_skipped += 1
        if len(self.examples) < MAX_EXAMPLES:
            self.examples.append(message)

    def add(self, other: "BatchCounts") -> None:
        self.num_records += other.num_records
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

    def describe(self) -> str:
        parts = [f"{self.num_samples:,} samples, {self.num_tokens:,} tokens, {self.num_targets:,} target tokens"]
        if lengths := self.lengths.describe():
            parts.append(lengths)
        parts += self.content.describe()
        if self.num_skipped:
            parts.append(
                f"{self.num_skipped:,} of {self.num_records:,} records skipped as bad, such as {self.examples[0]}"
            )
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


def check_any_left(summary: Summary, key: str) -> None:
    """Raise UserError when every record was skipped or dropped."""
    if summary.num_samples == 0:
        reason = f"; the first: {summary.examples[0]}" if summary.examples else ""
        raise UserError(
            f"{key}: none of its {summary.num_records:,} records is left: {summary.num_skipped:,} skipped as bad,"
            f" {summary.lengths.num_dropped:,} dropped as too long{reason}; "
            "fix the data, data.length_policy or max_seq_length"
        )
