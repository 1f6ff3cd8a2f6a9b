"""What tokenizing has made of the records, counted: nothing is lost without a word.

While it runs, each batch leaves one line of `BatchCounts` in a file (processes append whole lines); at the end they are one
`Summary`, kept beside the tokens for the log of later runs.
"""

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

from data.length import LengthCounts
from errors import UserError

MAX_EXAMPLES = 3


@dataclass
class BatchCounts:
    """One batch of records. Examples are messages of records that were skipped."""

    num_records: int = 0
    num_skipped: int = 0
    lengths: LengthCounts = field(default_factory=LengthCounts)
    examples: list[str] = field(default_factory=list)

    def add_skipped(self, message: str) -> None:
        self.num_skipped += 1
        if len(self.examples) < MAX_EXAMPLES:
            self.examples.append(message)

    def append_to(self, path: Path) -> None:
        """One write to a file opened for appending, so that lines of several processes do not mix."""
        line = (json.dumps(asdict(self)) + "\n").encode()
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(file, line)
        finally:
            os.close(file)


def load_counts(path: Path) -> BatchCounts:
    """All lines together. Which of many skipped records are the examples may differ from run to run."""
    total = BatchCounts()
    for line in path.read_text().splitlines():
        batch = json.loads(line)
        total.num_records += batch["num_records"]
        total.num_skipped += batch["num_skipped"]
        total.lengths.add(LengthCounts(**batch["lengths"]))
        total.examples = (total.examples + batch["examples"])[:MAX_EXAMPLES]
    return total


@dataclass(frozen=True)
class Summary:
    """What a tokenized folder holds, and what became of the records."""

    num_samples: int
    num_tokens: int
    num_targets: int
    num_records: int
    num_skipped: int
    lengths: LengthCounts
    examples: list[str]

    def describe(self) -> str:
        parts = [f"{self.num_samples:,} samples, {self.num_tokens:,} tokens, {self.num_targets:,} target tokens"]
        if lengths := self.lengths.describe():
            parts.append(lengths)
        if self.num_skipped:
            parts.append(f"{self.num_skipped:,} of {self.num_records:,} records skipped as bad, such as {self.examples[0]}")
        return "; ".join(parts)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Summary":
        """Raises ValueError, KeyError or TypeError for a damaged text."""
        fields = json.loads(text)
        return cls(**fields | {"lengths": LengthCounts(**fields["lengths"])})


def check_any_left(summary: Summary, key: str) -> None:
    """Raises UserError when every record was skipped or dropped."""
    if summary.num_samples == 0:
        reason = f"; the first: {summary.examples[0]}" if summary.examples else ""
        raise UserError(
            f"{key}: none of its {summary.num_records:,} records is left: {summary.num_skipped:,} skipped as bad,"
            f" {summary.lengths.num_dropped:,} dropped as too long{reason}; mend the data, data.length_policy or max_seq_length"
        )
