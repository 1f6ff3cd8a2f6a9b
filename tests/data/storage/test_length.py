"""Samples longer than a row: what is kept, what is lost, and the counts."""

import pytest

from data.options import LengthPolicy
from data.sample import Sample
from data.storage.length import LengthCounts, fit_group, fit_sample
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


def build_answer(length: int, prompt: int = 2, first: int = 100) -> Sample:
    """first: the first token of the answer."""
    answer = list(range(first, first + length - prompt))
    return Sample(input_ids=[*range(prompt), *answer], labels=[-100] * prompt + answer)


@pytest.mark.parametrize(
    ("lengths", "room", "kept"),
    [
        ((5, 6), 11, [5, 6]),
        ((5, 6), 10, [5, 5]),
        ((4, 9), 10, [4, 6]),
        ((9, 4), 10, [6, 4]),
        ((9, 9), 11, [5, 5]),
        ((3, 9, 8), 15, [3, 6, 6]),
    ],
)
def test_samples_that_share_a_row_are_cut_to_fit_there(lengths: tuple[int, ...], room: int, kept: list[int]) -> None:
    """The longest first; those that are short lose nothing."""
    group = tuple(build_answer(length, first=100 * (1 + number)) for number, length in enumerate(lengths))
    fitted, counts = fit_group(group, "train.jsonl:12", TRUNCATE, room, shares_row=True)
    assert [len(sample["input_ids"]) for sample in fitted] == kept
    assert counts.num_truncated == sum(one != other for one, other in zip(lengths, kept))
    assert counts.num_lost_tokens == sum(lengths) - sum(kept)
    dropped, counts = fit_group(group, "train.jsonl:12", DROP, room, shares_row=True)
    assert (dropped, counts.num_dropped) == (([], len(group)) if kept != [*lengths] else ([*fitted], 0))
    alone, _ = fit_group(group, "train.jsonl:12", TRUNCATE, room)
    assert [len(sample["input_ids"]) for sample in alone] == [min(length, room) for length in lengths]


def test_a_part_of_a_row_that_holds_the_prompt_alone() -> None:
    message = (
        "^train.jsonl:12: the prompt has 6 tokens and its part of a packed row of max_seq_length=12 is 6, so no token"
    )
    with pytest.raises(UserError, match=message):
        fit_group(
            (build_answer(8, prompt=6), build_answer(9, prompt=6)), "train.jsonl:12", TRUNCATE, 12, shares_row=True
        )
    late = build_answer(9)
    late["input_ids"][7] = late["labels"][7] = 50
    with pytest.raises(UserError, match="compared are the same up to 6 of max_seq_length=12 tokens; raise it"):
        fit_group((late, build_answer(9)), "train.jsonl:12", TRUNCATE, 12, shares_row=True)
