"""The length policy: samples longer than a row, or than their part of one, are truncated, dropped or split. T is
`max_seq_length`."""

from collections.abc import Sequence
from dataclasses import dataclass

from console import pluralize
from data.options import LengthPolicy
from data.sample import IGNORE_INDEX, OVERLAP, Group, Sample, count_targets
from errors import UserError


@dataclass
class LengthCounts:
    """Counts of what the policy has done; targets are counted after the shift. num_without_text: truncated samples of
    which no token of their own text is left."""

    num_truncated: int = 0
    num_dropped: int = 0
    num_split: int = 0
    num_without_text: int = 0
    num_lost_tokens: int = 0
    num_lost_targets: int = 0

    def add(self, other: "LengthCounts") -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    def describe(self) -> list[str]:
        """Return the counts in words, one line each; empty when every sample fit."""
        lines = [
            pluralize(count, what)
            for count, what in (
                (self.num_truncated, "sample truncated"),
                (self.num_dropped, "sample too long and dropped"),
                (self.num_split, "sample split"),
            )
            if count
        ]
        if lines:
            lines.append(
                f"{pluralize(self.num_lost_tokens, 'token')} lost by it ({self.num_lost_targets:,} of them targets)"
            )
        if self.num_without_text:
            lines.append(
                f"{pluralize(self.num_without_text, 'sample')} without a token of their own text, since what comes "
                "before it fills the row: raise max_seq_length"
            )
        return lines


def fit_sample(
    sample: Sample, location: str, policy: LengthPolicy, max_seq_length: int | None, limit: str = "max_seq_length"
) -> tuple[list[Sample], LengthCounts]:
    """Return the samples of at most `max_seq_length` tokens (None: of any length) that a sample becomes, and counts.

    The first token of each, which nothing predicts, has the label -100. A piece without a target is omitted and
    counted. limit: what messages call `max_seq_length`. Raises `UserError` for a sample without a target, and for one
    that `truncate` leaves without a target.
    """
    length, num_targets = len(sample["input_ids"]), count_targets(sample)
    if length != len(sample["labels"]):
        raise UserError(
            f"{location}: the encoder made {length} input_ids and {len(sample['labels'])} labels; "
            "one label per token is needed"
        )
    if num_targets == 0:
        raise UserError(f"{location}: no token of the record carries loss; fix or remove it")
    if max_seq_length is None or length <= max_seq_length:
        return [_cut(sample, 0, length)], LengthCounts()
    starts = {
        LengthPolicy.drop: [],
        LengthPolicy.truncate: [0],
        LengthPolicy.split: _list_starts(length, max_seq_length),
    }[policy]
    kept: list[Sample] = []
    num_kept_tokens = end = 0
    for start in starts:
        piece = _cut(sample, start, start + max_seq_length)
        if num_last := min(sample.get("num_last", 0), len(piece["input_ids"])):
            piece["input_ids"][-num_last:] = sample["input_ids"][-num_last:]
        if count_targets(piece) == 0:
            continue
        kept.append(piece)
        stop = start + len(piece["input_ids"])
        num_kept_tokens += stop - max(start, end)  # a token that two pieces share counts once
        end = stop
        if policy is LengthPolicy.truncate:
            piece["num_cut"] = length - stop
    if not kept and policy is LengthPolicy.truncate:
        raise UserError(_describe_lost(sample, location, max_seq_length, limit))
    return kept, LengthCounts(
        num_truncated=int(policy is LengthPolicy.truncate),
        num_dropped=int(policy is LengthPolicy.drop),
        num_split=int(policy is LengthPolicy.split),
        num_without_text=int(policy is LengthPolicy.truncate and _has_lost_text(sample, max_seq_length)),
        num_lost_tokens=length - num_kept_tokens,
        num_lost_targets=num_targets - sum(count_targets(piece) for piece in kept),
    )


def fit_samples(
    samples: Sequence[Sample], location: str, policy: LengthPolicy, max_seq_length: int | None
) -> tuple[list[Sample], LengthCounts]:
    """Fit each of the samples of a record as `fit_sample` does. Those that are left without a target are omitted and
    counted; where none is left, raises its `UserError`."""
    fitted, counts, problems = [], LengthCounts(), []
    for sample in samples:
        try:
            kept, sample_counts = fit_sample(sample, location, policy, max_seq_length)
        except UserError as error:
            problems.append(error)
            num_tokens, num_targets = len(sample["input_ids"]), count_targets(sample)
            kept = []
            sample_counts = LengthCounts(num_truncated=1, num_lost_tokens=num_tokens, num_lost_targets=num_targets)
        fitted += kept
        counts.add(sample_counts)
    if problems and not fitted:
        raise problems[0]
    return fitted, counts


def fit_group(
    group: Group, location: str, policy: LengthPolicy, max_seq_length: int | None, shares_row: bool = False
) -> tuple[list[Sample], LengthCounts]:
    """Fit the samples that stay together as `fit_sample` does; where one is dropped, drop all.

    shares_row: whether they have at most `max_seq_length` tokens together; where they have more, the longest ones are
    too long. Raises `UserError` also where the first two are the same after they are cut.
    """
    fitted, counts, limit, most = [], LengthCounts(), "max_seq_length", f"max_seq_length={max_seq_length}"
    if shares_row and max_seq_length is not None:
        part = _find_part([len(sample["input_ids"]) for sample in group], max_seq_length)
        if part < max_seq_length:
            limit, most = f"its part of a packed row of {most}", f"{part} of {most}"
            max_seq_length = part
    for sample in group:
        kept, sample_counts = fit_sample(sample, location, policy, max_seq_length, limit)
        fitted += kept
        counts.add(sample_counts)
    if len(fitted) < len(group):
        for sample in fitted:  # another one was dropped
            counts.add(
                LengthCounts(
                    num_dropped=1,
                    num_lost_tokens=len(sample["input_ids"]),
                    num_lost_targets=count_targets(sample),
                )
            )
        return [], counts
    if "label" not in fitted[0] and _has_same_tokens(fitted[0], fitted[1]):
        raise UserError(
            f"{location}: the two texts that are compared are the same up to {most} tokens; raise it, or remove the "
            "record"
        )
    return fitted, counts


def _find_part(lengths: Sequence[int], room: int) -> int:
    """Return the tokens of a sample at which samples of these lengths are cut to fill `room` together; `room` where all
    fit."""
    left = room
    for number, length in enumerate(sorted(lengths)):
        part = left // (len(lengths) - number)
        if length > part:
            return part
        left -= length
    return room


def _has_same_tokens(one: Sample, other: Sample) -> bool:
    return (one["input_ids"], one["labels"]) == (other["input_ids"], other["labels"])


def _list_starts(length: int, max_seq_length: int) -> Sequence[int]:
    return range(0, length - OVERLAP, max(1, max_seq_length - OVERLAP))


def _cut(sample: Sample, start: int, stop: int) -> Sample:
    attachments = sample.get("attachments", [])
    stop = min([stop, *(each.start for each in attachments if each.start < stop < each.stop)])
    labels = [IGNORE_INDEX, *sample["labels"][start + 1 : stop]]
    cut = Sample(input_ids=sample["input_ids"][start:stop], labels=labels)
    if "label" in sample:
        cut["label"] = sample["label"]
    if attachments:
        cut["attachments"] = [each for each in attachments if each.stop <= stop]
    if "num_prompt" in sample:
        cut["num_prompt"] = max(OVERLAP if start else 0, sample["num_prompt"] - start)
    return cut


def _has_lost_text(sample: Sample, max_seq_length: int) -> bool:
    """Return whether nothing of a sample's own text is left where what comes before it stays."""
    return max_seq_length - sample.get("num_last", 0) <= sample.get("num_first", 0)


def _describe_lost(sample: Sample, location: str, max_seq_length: int, limit: str) -> str:
    prompt_length = next(i for i, label in enumerate(sample["labels"]) if label != IGNORE_INDEX)
    return (
        f"{location}: the prompt has {prompt_length} tokens and {limit} is {max_seq_length}, so no token of the"
        " completion is left to train on; raise max_seq_length, set data.length_policy=drop, or shorten or remove the"
        " record"
    )
