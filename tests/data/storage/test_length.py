"""Samples longer than a row: what is kept, what is lost, and the counts."""

import pytest

from data.options import LengthPolicy
from data.sample import Sample
from data.storage.length import LengthCounts, fit_sample
from errors import UserError

TRUNCATE, DROP, SPLIT = LengthPolicy
PROMPT = 4
SAMPLE = Sample(input_ids=list(range(10, 21)), labels=[-100] * PROMPT + list(range(14, 21)))  # 11 tokens, 7 targets


def fit(sample: Sample, policy: LengthPolicy, length: int | None) -> tuple[list[Sample], LengthCounts]:
    return fit_sample(sample, "train.jsonl:12", policy, length)


@pytest.mark.parametrize("policy", LengthPolicy)
@pytest.mark.parametrize("length", [11, 12, None])
def test_what_fits_is_left_alone(policy: LengthPolicy, length: int | None) -> None:
    assert fit(SAMPLE, policy, length) == ([SAMPLE], LengthCounts())


def test_the_first_token_carries_no_label() -> None:
    (sample,), _ = fit(Sample(input_ids=[1, 2], labels=[1, 2]), TRUNCATE, 2)
    assert sample == {"input_ids": [1, 2], "labels": [-100, 2]}


def test_truncate_cuts_on_the_right() -> None:
    (sample,), counts = fit(SAMPLE, TRUNCATE, 6)
    assert sample == {"input_ids": SAMPLE["input_ids"][:6], "labels": SAMPLE["labels"][:6], "num_cut": 5}
    assert counts == LengthCounts(num_truncated=1, num_lost_tokens=5, num_lost_targets=5)


def test_drop_omits_it() -> None:
    assert fit(SAMPLE, DROP, 10) == ([], LengthCounts(num_dropped=1, num_lost_tokens=11, num_lost_targets=7))


@pytest.mark.parametrize("length", [2, 3, 4, 5, 10])
def test_split_trains_every_target_exactly_once(length: int) -> None:
    samples, counts = fit(SAMPLE, SPLIT, length)
    assert max(len(sample["input_ids"]) for sample in samples) <= length
    assert all(sample["labels"][0] == -100 for sample in samples)
    trained = [label for sample in samples for label in sample["labels"] if label != -100]
    assert trained == [label for label in SAMPLE["labels"] if label != -100]
    assert all(label in (-100, token) for s in samples for token, label in zip(s["input_ids"], s["labels"]))
    kept = {token for sample in samples for token in sample["input_ids"]}
    assert counts == LengthCounts(num_split=1, num_lost_tokens=11 - len(kept), num_lost_targets=0)


def test_split_counts_what_no_piece_trains() -> None:
    gap = Sample(input_ids=list(range(20)), labels=[-100, 1, 2] + [-100] * 14 + [17, 18, 19])
    samples, counts = fit(gap, SPLIT, 5)
    assert [sample["input_ids"] for sample in samples] == [[0, 1, 2, 3, 4], [16, 17, 18, 19]]
    assert counts == LengthCounts(num_split=1, num_lost_tokens=11, num_lost_targets=0)


def test_a_completion_cut_away_entirely() -> None:
    assert fit(SAMPLE, TRUNCATE, PROMPT + 1)[0][0]["labels"] == [-100] * PROMPT + [14]
    message = "^train.jsonl:12: the prompt has 4 tokens and max_seq_length is 4, so no token of the completion is left"
    with pytest.raises(UserError, match=f"{message} .*; raise max_seq_length, set data.length_policy=drop, or shorten"):
        fit(SAMPLE, TRUNCATE, PROMPT)
    # A target on the first token does not count: nothing predicts it.
    with pytest.raises(UserError, match="the prompt has 0 tokens and max_seq_length is 1"):
        fit(Sample(input_ids=[1, 2], labels=[1, 2]), TRUNCATE, 1)


@pytest.mark.parametrize("policy", LengthPolicy)
def test_a_record_without_a_target(policy: LengthPolicy) -> None:
    for labels in ([-100, -100], [5, -100]):
        with pytest.raises(UserError, match="^train.jsonl:12: no token of the record carries loss; fix or remove it"):
            fit(Sample(input_ids=[5, 6], labels=labels), policy, 1)


def test_labels_that_are_not_aligned() -> None:
    with pytest.raises(
        UserError, match="^train.jsonl:12: the encoder made 2 input_ids and 3 labels; one label per token is needed"
    ):
        fit(Sample(input_ids=[1, 2], labels=[1, 2, 3]), TRUNCATE, 8)


def test_counts_add_up_and_are_described() -> None:
    counts = LengthCounts()
    assert counts.describe() == []
    counts.add(LengthCounts(num_truncated=1, num_lost_tokens=1500, num_lost_targets=3))
    counts.add(LengthCounts(num_dropped=2, num_split=4, num_lost_tokens=1))
    assert counts.describe() == [
        "1 sample truncated", "2 samples too long and dropped", "4 samples split",
        "1,501 tokens lost by it (3 of them targets)",
    ]  # fmt: skip
