"""Answers to other prompts: of each sample its prompt, with the answer of the next record of the data.

A function of the data alone, so what a reference model thinks of it is computed once. `KEY/mismatched` is a tokenized
folder with as many samples in the same order; an answer that does not fit behind the other prompt is cut.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from data.encoders.sample import IGNORE_INDEX
from data.storage.cache import lock_folder
from data.storage.rows import RowPlan, copy_rows
from data.storage.tokenized import TokenizedDataset, TokenizedWriter, column_file, find_damage, load_summary
from errors import UserError

_BATCH = 1000  # samples


def mismatched_path(path: Path) -> Path:
    return path / "mismatched"


def prepare_mismatched(
    path: Path, plan: RowPlan, samples_per_record: int, log: Callable[[str], None] | None = None
) -> None:
    """Writes the folder, with the rows of `plan`, unless it is there. path: of the tokenized samples."""
    folder, say = mismatched_path(path), log or (lambda text: None)
    if find_damage(folder) is not None:
        with lock_folder(path, say):
            if find_damage(folder) is not None:
                _write(path, folder, plan.max_seq_length, samples_per_record)
    copy_rows(path, folder, plan)


def check_labels(path: Path, key: str, samples_per_record: int) -> None:
    """Raises UserError where all answers are desirable, or none is, and where an encoder has not said it."""
    if samples_per_record == 1 and not column_file(path, "desirable").is_file():
        raise UserError(
            f"{key}: task=kto needs to know of each sample whether it is desirable; data.encoder must say so"
        )
    desirable = TokenizedDataset(path, False, False).desirable
    if desirable.all() or not desirable.any():
        which = "true" if desirable.all() else "false"
        raise UserError(
            f"{key}: the labels of all {len(desirable):,} samples are {which}; task=kto learns from desirable and "
            "undesirable answers: add the others, or use task=sft with data=sft"
        )


def _write(path: Path, folder: Path, max_seq_length: int, samples_per_record: int) -> None:
    dataset, summary = TokenizedDataset(path, True, True), load_summary(path)
    temporary = folder.with_suffix(".tmp")
    for each in (temporary, folder):
        shutil.rmtree(each, ignore_errors=True)
    temporary.mkdir()
    with TokenizedWriter(temporary, num_sources=1) as writer:
        for start in range(0, len(dataset), _BATCH):
            numbers = range(start, min(start + _BATCH, len(dataset)))
            rows = list(_mismatch(dataset, numbers, max_seq_length, samples_per_record))
            columns = {
                "input_ids": np.concatenate([input_ids for input_ids, _ in rows]),
                "labels": np.concatenate([labels for _, labels in rows]),
                "length": np.array([len(labels) for _, labels in rows], np.int32),
                "num_targets": np.array([(labels != IGNORE_INDEX).sum() for _, labels in rows], np.int32),
            }
            writer.append(columns, 0)
        counted = replace(summary, num_tokens=writer.num_tokens, num_targets=writer.num_targets)
        writer.finish(replace(counted, fingerprints=writer.fingerprints))
    os.rename(temporary, folder)


def _mismatch(
    dataset: TokenizedDataset, numbers: range, max_seq_length: int, samples_per_record: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """input_ids and labels, int32 [T], of samples; where a record has two, both get those of the next record."""
    for number in numbers:
        other = (number + samples_per_record) % len(dataset)
        prompt = dataset.input_ids(number)[: _find_answer(dataset, number)]
        answer = slice(_find_answer(dataset, other), None)
        input_ids = np.concatenate([prompt, dataset.input_ids(other)[answer]])
        labels = np.concatenate([np.full(len(prompt), IGNORE_INDEX, np.int32), dataset.labels(other)[answer]])
        yield input_ids[:max_seq_length], labels[:max_seq_length]


def _find_answer(dataset: TokenizedDataset, number: int) -> int:
    """Where the first target is."""
    return int((dataset.labels(number) != IGNORE_INDEX).argmax())
