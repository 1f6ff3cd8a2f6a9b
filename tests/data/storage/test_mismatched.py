"""Mismatched answers: the record that they come from, also at the ends of runs of one prompt, and truncation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from data.storage.mismatched import check_labels, mismatched_path, prepare_mismatched
from data.storage.rows import RowPlan
from data.storage.summary import Summary
from data.storage.tokenized import TokenizedDataset, TokenizedWriter
from errors import UserError


def save_samples(path: Path, prompts: list[int], desirable: list[bool] | None = None) -> None:
    """Sample i has the prompt [p, p] and the answer [100 + i] * 3."""
    path.mkdir()
    answers = np.arange(100, 100 + len(prompts))
    input_ids = np.stack([prompts, prompts, answers, answers, answers], axis=1).astype(np.int32)
    labels = np.where(input_ids >= 100, input_ids, -100).astype(np.int32)
    columns = {
        "input_ids": input_ids.reshape(-1),
        "labels": labels.reshape(-1),
        "length": np.full(len(prompts), 5, np.int32),
        "num_targets": np.full(len(prompts), 3, np.int32),
        "num_prompt": np.full(len(prompts), 2, np.int32),
    }
    if desirable is not None:
        columns["label"] = np.array(desirable, np.int32)
    with TokenizedWriter(path, num_sources=1) as writer:
        writer.append(columns, 0)
        counts = {name: getattr(writer, name) for name in ("num_samples", "num_tokens", "num_targets")}
        writer.finish(Summary(**counts, num_records=len(prompts), fingerprints=writer.fingerprints))


@pytest.mark.parametrize(
    ("prompts", "samples_per_record", "others"),
    [
        ([1, 2, 3], 1, [1, 2, 0]),
        ([1, 1, 2, 2, 3, 3], 1, [2, 3, 4, 5, 0, 1]),  # two answers to each prompt
        ([1, 1, 2, 3, 3, 3], 1, [2, 2, 3, 0, 1, 0]),
        ([1, 2, 3, 1], 1, [1, 2, 3, 1]),  # the last prompt equals the first: wraps around to another one
        ([1, 1, 2, 2, 3, 3], 2, [2, 3, 4, 5, 0, 1]),  # pairs
        ([1, 1, 1, 1, 2, 2], 2, [4, 5, 4, 5, 0, 1]),
    ],
)
def test_the_answer_is_one_to_another_prompt(
    tmp_path: Path, prompts: list[int], samples_per_record: int, others: list[int]
) -> None:
    path = tmp_path / "data"
    save_samples(path, prompts)
    prepare_mismatched(path, RowPlan(4), "train_file", samples_per_record)
    dataset = TokenizedDataset(mismatched_path(path), True, True)
    assert [dataset.input_ids(i).tolist() for i in range(len(prompts))] == [
        [prompt, prompt, 100 + other, 100 + other] for prompt, other in zip(prompts, others, strict=True)
    ]  # cut to 4 tokens
    assert [dataset.labels(i).tolist() for i in range(len(prompts))] == [
        [-100, -100, 100 + other, 100 + other] for other in others
    ]
    assert dataset.num_targets.tolist() == [2] * len(prompts)


def test_where_answers_begin_is_not_in_the_hash_that_checkpoints_of_earlier_versions_name(tmp_path: Path) -> None:
    tokens = np.arange(3, dtype=np.int32)
    columns = {"input_ids": tokens, "labels": tokens, "length": tokens[1:2] + 2, "num_targets": tokens[2:]}
    found = []
    for added in ({}, {"num_prompt": tokens[1:2]}):
        with TokenizedWriter(tmp_path, num_sources=1) as writer:
            writer.append({**columns, **added}, 0)
            found.append(writer.fingerprints)
    assert found[0] == found[1]


@pytest.mark.parametrize(("prompts", "samples_per_record"), [([1], 1), ([1, 1, 1], 1), ([1, 1], 2)])
def test_one_prompt_alone_is_refused(tmp_path: Path, prompts: list[int], samples_per_record: int) -> None:
    save_samples(tmp_path / "data", prompts)
    with pytest.raises(UserError, match=r"^eval_file: there is one prompt alone, of \d records?"):
        prepare_mismatched(tmp_path / "data", RowPlan(8), "eval_file", samples_per_record)


@pytest.mark.parametrize(
    ("desirable", "trains", "message"),
    [
        ([True, True], True, "all labels are true, of 2 samples"),
        ([False, False], True, "all labels are false, of 2 samples"),
        ([False, False], False, None),
        ([False, True], True, None),
        ([True], False, "needs a label of each sample, desirable or not"),  # an encoder that sets it for some
        (None, True, "needs a label of each sample, desirable or not"),
    ],
)
def test_labels_are_there_and_of_both_kinds(
    tmp_path: Path, desirable: list[bool] | None, trains: bool, message: str | None
) -> None:
    save_samples(tmp_path / "data", [1, 2], desirable)
    if message is None:
        check_labels(tmp_path / "data", "train_file", 1, trains=trains)
        return
    with pytest.raises(UserError, match=message):
        check_labels(tmp_path / "data", "train_file", 1, trains=trains)
