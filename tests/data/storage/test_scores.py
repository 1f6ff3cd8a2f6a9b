"""Scores next to the tokens are whole or absent, found by all that they depend on, and written by one run at a time."""

from __future__ import annotations

import json
import pickle
import socket
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from batch import Column, Per, Source
from data.encoders.sft import SFTEncoder
from data.loading.columns import list_scored_columns
from data.options import Packing
from data.storage.encoding import Encoding
from data.storage.hashes import write_hashes
from data.storage.rows import RowPlan, prepare_rows
from data.storage.scores import DESCRIPTION, Scores, ScoresWriter, find_scores, write_scores
from data.storage.tokenized import load_summary
from data.storage.tokenizing import prepare_dataset
from errors import UserError
from extensions.distillation.scores import describe_covered, list_teacher_columns
from filesystem import lock_file

NUM_ROWS, TOP_K = 11, 3
REFERENCE = Column("reference", torch.float64, Per.document, Source.scored)


def tokenize(folder: Path, tokenizer: Any, num_records: int = NUM_ROWS, max_seq_length: int = 64) -> Path:
    file = folder / f"{num_records}.jsonl"
    file.write_text("".join(f'{{"prompt": "{each} legs", "completion": "{each}"}}\n' for each in range(num_records)))
    encoding = Encoding(SFTEncoder(), tokenizer, max_seq_length)
    return prepare_dataset([str(file)], key="train_file", encoding=encoding, cache_dir=folder / "cache", log=None)


@pytest.fixture
def path(tmp_path: Path, tokenizer: Any) -> Path:
    return tokenize(tmp_path, tokenizer)


def find_reference(path: Path, model_id: str = "0") -> Scores:
    return find_scores("reference", path, RowPlan(64), (REFERENCE,), model_id)


def find_teacher(path: Path, plan: RowPlan | None = None, model_id: str = "0", temperature: float = 2.0) -> Scores:
    columns = list_teacher_columns(TOP_K)
    plan = plan or RowPlan(64)
    return find_scores("teacher", path, plan, columns, model_id, top_k=TOP_K, temperature=temperature)


def write(scores: Scores, value: float = -1.0) -> Scores:
    writer = ScoresWriter(scores, "train_file")
    count = scores.num_values
    written = [np.full((count, *column.shape), value - index) for index, column in enumerate(scores.columns)]
    writer.write(np.arange(count)[::-1], written)
    writer.finish({"noted": 1})
    return scores


def test_scores_are_whole_or_absent(path: Path) -> None:
    assert not find_reference(path).is_whole()
    scores = write(find_reference(path))
    assert scores.num_values == NUM_ROWS and scores.num_bytes == 8 * NUM_ROWS
    assert scores.is_whole() and not replace(scores, num_values=10).is_whole()
    assert not find_reference(path, "1").is_whole()
    assert json.loads((scores.folder / DESCRIPTION).read_text()) == {"made_from": scores.made_from, "noted": 1}
    with open(scores.find_file(scores.folder, REFERENCE), "r+b") as stream:
        stream.truncate(8)
    assert not scores.is_whole() and not scores.is_whole(compares_bytes=False)
    assert write(scores).is_whole()
    assert not list(path.glob("*.tmp*")) and not list(path.glob("*.part"))


@pytest.mark.parametrize("place", [0, 45, 87])
def test_a_flipped_byte_is_found(path: Path, place: int) -> None:
    scores = write(find_reference(path))
    file = scores.find_file(scores.folder, REFERENCE)
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)
    assert not scores.is_whole() and scores.is_whole(compares_bytes=False)


def test_scores_are_found_beside_the_same_samples(tmp_path: Path, tokenizer: Any) -> None:
    """Under another key of the cache, which changes more often than the samples."""
    first, again = tokenize(tmp_path, tokenizer), tokenize(tmp_path, tokenizer, max_seq_length=65)
    others = tokenize(tmp_path, tokenizer, num_records=12)
    scores = write(find_reference(first))
    assert first != again and find_reference(again).folder == scores.folder and find_reference(again).is_whole()
    assert find_reference(again, "1").folder.parent == again and find_reference(others).folder.parent == others
    own = replace(scores, folder=again / scores.folder.name)
    write_scores(own, "train_file", scores.load())
    assert find_reference(again).folder == own.folder and find_reference(first).folder == scores.folder
    assert own.load()[0].tolist() == scores.load()[0].tolist()


def test_scores_are_found_by_all_that_they_depend_on(tmp_path: Path, tokenizer: Any) -> None:
    path, packed = tokenize(tmp_path, tokenizer), RowPlan(64, Packing.BEST_FIT)
    prepare_rows(path, packed, "train_file", None)
    found = [
        find_teacher(path),
        find_teacher(path, model_id="1"),
        find_teacher(path, temperature=1.0),
        find_teacher(path, packed),
        find_scores("teacher", path, RowPlan(64), list_teacher_columns(4), "0", top_k=4, temperature=2.0),
        find_teacher(tokenize(tmp_path, tokenizer, num_records=12)),
    ]
    assert len({scores.folder.name for scores in found}) == len(found)
    assert len({scores.num_values for scores in found[:5]}) == 1  # targets, however they are packed


def test_what_a_teacher_wrote_before_columns_had_one_format_is_found(path: Path) -> None:
    """Its folder has the same name and files, and another description."""
    scores = write(find_teacher(path))
    described = {"num_targets": scores.num_values, "top_k": TOP_K, "covered": 0.5}
    (scores.folder / DESCRIPTION).write_text(json.dumps(described))
    (scores.folder / "hashes.json").unlink()
    write_hashes(scores.folder)
    assert scores.is_whole() and describe_covered(scores) == "3 tokens cover 50.00% of its probability"
    assert sorted(file.stem for file in scores.folder.glob("*.bin")) == ["log_probabilities", "token_ids"]
    state = ("0", load_summary(path).fingerprints, "", TOP_K, 2.0)
    assert tuple(scores.made_from.values()) == state


def test_columns_have_the_shape_and_dtype_that_they_declare(path: Path) -> None:
    scores = write(find_teacher(path), value=7)
    token_ids, logs = (scores.map(scores.folder, column, "r") for column in scores.columns)
    assert token_ids.shape == (scores.num_values, TOP_K) and token_ids.dtype == np.int32 and (token_ids == 7).all()
    assert logs.shape == (scores.num_values, TOP_K + 1) and logs.dtype == np.float32 and (logs == 6).all()
    read = list_scored_columns(scores)
    assert [each.column for each in read] == list(scores.columns)
    assert pickle.loads(pickle.dumps(read[1])).column == scores.columns[1]  # as worker processes get it


def test_a_pass_that_another_run_has_done_meanwhile_is_not_repeated(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = find_teacher(path)
    first = ScoresWriter(scores, "train_file")
    with pytest.raises(UserError, match="train_file: another run is writing"):
        ScoresWriter(scores, "train_file")

    def lock_after_the_first(file: Path) -> object:
        first.finish({})
        return lock_file(file)

    monkeypatch.setattr("data.storage.scores.lock_file", lock_after_the_first)
    with pytest.raises(UserError, match=f"train_file: another run has just written .* into {scores.folder}; start"):
        ScoresWriter(scores, "train_file")
    assert sorted(file.name for file in path.glob("teacher-*")) == [scores.folder.name, f"{scores.folder.name}.lock"]


def test_runs_may_write_small_scores_at_a_time(path: Path) -> None:
    scores = find_reference(path)
    writers = [ScoresWriter(scores, "train_file") for _ in range(3)]
    for writer in (writers[1], writers[0], writers[2]):
        writer.write(np.arange(NUM_ROWS), [np.arange(NUM_ROWS) - 20.0])
        writer.finish({})
        assert scores.is_whole()
        assert scores.map(scores.folder, REFERENCE, "r")[3] == -17
    lock = f"{scores.folder.name}.{socket.gethostname()}.lock"
    assert sorted(file.name for file in path.glob("reference-*")) == [scores.folder.name, lock]


def test_hosts_that_do_not_see_each_others_locks_write_apart(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scores, names = find_reference(path), iter(["one", "other"])
    monkeypatch.setattr("socket.gethostname", lambda: next(names))
    monkeypatch.setattr("data.storage.scores.lock_file", lambda file: SimpleNamespace(release=lambda: None))
    writers = [ScoresWriter(scores, "train_file") for _ in range(2)]
    for writer in writers:
        writer.write(np.arange(NUM_ROWS), [np.full(NUM_ROWS, -3.0)])
    writers[1].finish({})
    writers[0].advance(1)
    assert scores.is_whole()
    writers[0].finish({})
    assert scores.is_whole() and not list(path.glob("*.part"))


def test_what_a_killed_run_left_is_deleted(path: Path) -> None:
    scores = find_reference(path)
    left = (
        path / f"{scores.folder.name}.{socket.gethostname()}.{2**22 + 1}.00000000.tmp"
    )  # above the largest process id
    left.mkdir()
    first = ScoresWriter(scores, "train_file")
    ScoresWriter(scores, "train_file")
    assert not left.exists() and first.rows_done == 0


def test_a_pass_whose_file_was_cut_begins_anew(path: Path) -> None:
    scores = find_teacher(path)
    writer = ScoresWriter(scores, "train_file")
    writer._committed -= 100
    writer.advance(4)
    assert writer._lock is not None
    writer._lock.release()
    file = next(scores.folder.with_name(f"{scores.folder.name}.part").glob("*.bin"))
    with open(file, "r+b") as stream:
        stream.truncate(8)
    assert ScoresWriter(scores, "train_file").rows_done == 0


def test_the_disk_space_is_taken_before_a_pass(path: Path) -> None:
    """Mapped memory that finds no room on the disk ends the process with a signal."""
    scores = replace(find_teacher(path), num_values=50_000)
    ScoresWriter(scores, "train_file")
    files = list(scores.folder.with_name(f"{scores.folder.name}.part").glob("*.bin"))
    assert len(files) == 2
    for file in files:
        assert file.stat().st_blocks * 512 >= file.stat().st_size > 0, file


def test_too_little_room_is_refused(path: Path) -> None:
    with pytest.raises(UserError, match="train_file: the teacher's distributions take .* free; lower distill.top_k"):
        too_many = replace(find_teacher(path), num_values=10**15)
        ScoresWriter(too_many, "train_file", "the teacher's distributions", "lower distill.top_k, ")
