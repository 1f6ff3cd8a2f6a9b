"""Mismatched answers: each prompt with the answer of a record that has another prompt.

That is the next record with another prompt: answers to one prompt tend to be adjacent, and of several the one at the
same index is taken. It depends on the data alone, so the reference model's log-probabilities are computed once.
`KEY/mismatched` is a tokenized folder with as many samples in the same order; an answer that does not fit after the
other prompt is cut.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from console import pluralize
from data.sample import IGNORE_INDEX
from data.storage.cache import lock_folder
from data.storage.tokenized import TokenizedDataset, TokenizedWriter, find_damage, load_summary
from errors import UserError
from filesystem import discard_folder, make_temporary, publish_folder

MISMATCHED = "mismatched"
_BATCH = 1000  # samples


def mismatched_path(path: Path) -> Path:
    """Return the folder of the mismatched samples of the tokenized folder `path`."""
    return path / MISMATCHED


def prepare_mismatched(
    path: Path,
    max_seq_length: int,
    key: str,
    samples_per_record: int,
    log: Callable[[str], None] | None = None,
    compares_bytes: bool = True,
) -> None:
    """Write the folder, without rows, unless it exists. path: the tokenized folder of `key`. compares_bytes: as of
    `prepare_dataset`.

    Raises UserError where all records have one prompt.
    """
    folder, say = mismatched_path(path), log or (lambda text: None)
    if find_damage(folder, compares_bytes) is not None:
        with lock_folder(path, say):
            if find_damage(folder, compares_bytes) is not None:
                _write(path, folder, key, max_seq_length, samples_per_record)


def check_labels(path: Path, key: str, samples_per_record: int, *, trains: bool) -> None:
    """Raise UserError where samples have no label, or, in training data, where all labels are the same."""
    dataset = TokenizedDataset(path, False, False)
    labels = dataset.sample_labels
    if samples_per_record == 1 and labels is None:
        raise UserError(f"{key}: task=kto needs a label of each sample, desirable or not; data.encoder must set it")
    desirable = np.arange(len(dataset)) % 2 == 0 if labels is None else labels[:, 0] != 0  # of a pair the first one
    if trains and (desirable.all() or not desirable.any()):
        which = "true" if desirable.all() else "false"
        raise UserError(
            f"{key}: all labels are {which}, of {pluralize(len(desirable), 'sample')}; task=kto learns from "
            "desirable and "
            "undesirable answers: add the others, or use task=sft with data=sft"
        )


def _write(path: Path, folder: Path, key: str, max_seq_length: int, samples_per_record: int) -> None:
    dataset, summary = TokenizedDataset(path, True, True), load_summary(path)
    others = _choose_others(dataset, key, samples_per_record)
    discard_folder(folder)
    temporary = make_temporary(folder)
    with TokenizedWriter(temporary, num_sources=1) as writer:
        for start in range(0, len(dataset), _BATCH):
            numbers = range(start, min(start + _BATCH, len(dataset)))
            rows = list(_mismatch(dataset, numbers, others, max_seq_length))
            columns = {
                "input_ids": np.concatenate([input_ids for input_ids, _ in rows]),
                "labels": np.concatenate([labels for _, labels in rows]),
                "length": np.array([len(labels) for _, labels in rows], np.int32),
                "num_targets": np.array([(labels[1:] != IGNORE_INDEX).sum() for _, labels in rows], np.int32),
            }
            writer.append(columns, 0)
        counted = replace(summary, num_tokens=writer.num_tokens, num_targets=writer.num_targets)
        writer.finish(replace(counted, fingerprints=writer.fingerprints))
    publish_folder(temporary, folder)


def _choose_others(dataset: TokenizedDataset, key: str, samples_per_record: int) -> np.ndarray:
    """Return the index of the sample whose answer each one gets, int64 [N].

    Adjacent records with one prompt are a run, and a record gets the answer at its own index in the next run; both
    samples of a pair get those of the same other record.
    """
    num_records = len(dataset) // samples_per_record
    starts = _find_runs(dataset, samples_per_record)  # in records
    if len(starts) == 1:
        raise UserError(
            f"{key}: there is one prompt alone, of {pluralize(num_records, 'record')}, so there is no answer to "
            "another one, which "
            "task=kto compares with; add records"
        )
    ends = [*starts[1:], num_records]
    following = [*range(1, len(starts)), 0]
    if _read_prompt(dataset, starts[-1] * samples_per_record) == _read_prompt(dataset, 0):
        following[-1] = 1
    others = np.empty(num_records, np.int64)
    for start, end, run in zip(starts, ends, following):
        others[start:end] = starts[run] + np.arange(end - start) % (ends[run] - starts[run])
    return (others[:, None] * samples_per_record + np.arange(samples_per_record)).reshape(-1)


def _find_runs(dataset: TokenizedDataset, samples_per_record: int) -> Sequence[int]:
    """Return the records whose prompt differs from the previous one."""
    starts, before = [], None
    for record in range(len(dataset) // samples_per_record):
        prompt = _read_prompt(dataset, record * samples_per_record)
        if prompt != before:
            starts.append(record)
        before = prompt
    return starts


def _mismatch(
    dataset: TokenizedDataset, numbers: range, others: np.ndarray, max_seq_length: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield input_ids and labels, int32 [T], of mismatched samples."""
    for number in numbers:
        other = int(others[number])
        prompt = dataset.input_ids(number)[: _find_answer(dataset, number)]
        answer = slice(_find_answer(dataset, other), None)
        input_ids = np.concatenate([prompt, dataset.input_ids(other)[answer]])
        labels = np.concatenate([np.full(len(prompt), IGNORE_INDEX, np.int32), dataset.labels(other)[answer]])
        yield input_ids[:max_seq_length], labels[:max_seq_length]


def _read_prompt(dataset: TokenizedDataset, number: int) -> bytes:
    return dataset.input_ids(number)[: _find_answer(dataset, number)].tobytes()


def _find_answer(dataset: TokenizedDataset, number: int) -> int:
    """Return the position of the answer's first token."""
    return int(dataset.num_prompt[number])
