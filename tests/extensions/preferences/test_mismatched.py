"""Mismatched answers: the record that they come from, also at the ends of runs of one prompt, and truncation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.configs import build_config
from support.tiny import save_pairs, save_tokenizer
from transformers import PretrainedConfig

from data.options import Packing
from data.storage.rows import RowPlan, Rows, copy_rows, count_rows, prepare_rows
from data.storage.scores import find_scores, write_scores
from data.storage.summary import Summary
from data.storage.tokenized import TokenizedDataset, TokenizedWriter
from errors import UserError
from extensions.preferences.mismatched import MISMATCHED, check_labels, mismatched_path, prepare_mismatched
from extensions.preferences.reference import REFERENCE
from training.inputs.datasets import build_row_plan, prepare_file
from training.inputs.estimates import estimate_steps


def save_samples(
    path: Path, prompts: list[int], desirable: list[bool] | None = None, lengths: list[int] | None = None
) -> None:
    """Sample i has the prompt [p, p] and the answer [100 + i] * 3. lengths: of the answers, in place of 3."""
    path.mkdir()
    sizes = np.array(lengths or [3] * len(prompts), np.int32)
    samples = [[prompt] * 2 + [100 + i] * int(sizes[i]) for i, prompt in enumerate(prompts)]
    input_ids = np.concatenate(samples).astype(np.int32)
    columns = {
        "input_ids": input_ids,
        "labels": np.where(input_ids >= 100, input_ids, -100).astype(np.int32),
        "length": 2 + sizes,
        "num_targets": sizes,
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
    prepare_mismatched(path, 4, "train_file", samples_per_record)
    dataset = TokenizedDataset(mismatched_path(path), True, True)
    assert [dataset.input_ids(i).tolist() for i in range(len(prompts))] == [
        [prompt, prompt, 100 + other, 100 + other] for prompt, other in zip(prompts, others, strict=True)
    ]  # cut to 4 tokens
    assert [dataset.labels(i).tolist() for i in range(len(prompts))] == [
        [-100, -100, 100 + other, 100 + other] for other in others
    ]
    assert dataset.num_targets.tolist() == [2] * len(prompts)


def test_packed_rows_have_room_for_the_mismatched_answers_too(tmp_path: Path) -> None:
    path, plan = tmp_path / "data", RowPlan(16, Packing.BEST_FIT, companion=MISMATCHED)
    save_samples(path, list(range(1, 9)), lengths=[1, 12, 2, 8, 3, 7, 1, 1])
    prepare_mismatched(path, 16, "train_file", 1)
    prepare_rows(path, plan, "train_file", None)
    copy_rows(path, mismatched_path(path), plan)
    own, others = Rows(path, plan, True, True), Rows(mismatched_path(path), plan, True, True)
    every = np.arange(len(own))
    assert 1 < len(own) == len(others) < 8 and own.offsets.tolist() == others.offsets.tolist()
    assert own.list_samples(every).tolist() == others.list_samples(every).tolist()
    assert sorted(own.sample_ids) == list(range(8)) and max(own.lengths) <= 16 and max(others.lengths) <= 16
    for rows, folder in ((own, path), (others, mismatched_path(path))):
        dataset = TokenizedDataset(folder, True, True)
        for row in every:
            samples = rows.list_samples(np.array([row]))
            expected = np.concatenate([dataset.input_ids(sample) for sample in samples])
            assert rows.input_ids(row).tolist() == expected.tolist()
            assert rows.num_targets[row] == dataset.num_targets[samples].sum()
    assert plan.folder(path) != RowPlan(16, Packing.BEST_FIT).folder(path)


def test_a_plan_has_room_for_them_once_they_are_made_and_says_so_before(tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path / "model")
    config = build_config(
        "data=preference", "task=kto", "data.packing=true", "max_seq_length=512", "num_train_epochs=1",
        f"model_name_or_path={tmp_path}/model", f"train_file={save_pairs(tmp_path / 'train.jsonl', 60)}",
        f"data.cache_dir={tmp_path}/cache",
    )  # fmt: skip
    steps, note = estimate_steps(config, 1, PretrainedConfig())
    rows = count_rows(prepare_file(config, "train_file", tokenizer, None), build_row_plan(config, "train_file"))
    assert steps is not None and steps < rows
    assert note.endswith("without the room that packed rows keep for mismatched samples: a run has more")
    assert estimate_steps(config, 1, PretrainedConfig()) == (rows, "")


def test_what_a_model_scored_of_them_is_found_beside_other_tokens_of_the_same_data(tmp_path: Path) -> None:
    """An update may tokenize the same data again under another key."""
    first, again = tmp_path / "first", tmp_path / "again"
    found = []
    for path in (first, again):
        save_samples(path, [1, 2, 3])
        prepare_mismatched(path, 4, "train_file", 1)
        for folder in (path, mismatched_path(path)):
            scores = find_scores("reference", folder, RowPlan(4), (REFERENCE,), "model")
            found.append(scores.folder)
            if not scores.is_whole():
                write_scores(scores, "train_file", [np.zeros(3)])
    assert found[2:] == found[:2] and found[1].parent == mismatched_path(first)


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
        prepare_mismatched(tmp_path / "data", 8, "eval_file", samples_per_record)


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
