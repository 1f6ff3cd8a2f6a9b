"""`data_report.html`: counts of each file, and samples of it that can be read, with their targets marked.

One file that needs no server and no network: the samples lie in it as JSON, and `page.html` next to this module shows
them. Of each file samples of all lengths are taken, from its shortest to its longest, up to a number of tokens in all,
so the page and the time that it takes do not grow with the data.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from data.sample import IGNORE_INDEX
from data.storage.file_report import FileReport, list_files, merge_rest
from data.storage.tokenized import TokenizedDataset
from extensions.inspection.report import describe_label
from filesystem import write_page

NAME = "data_report.html"
TEMPLATE = Path(__file__).with_name("page.html")
MOST_SAMPLES, LEAST_OF_FILE = 300, 3  # on the page, and of each file where there are that many
MOST_FILES = 60  # of a key; the others are one
MOST_TOKENS, MOST_OF_SAMPLE = 2_000_000, 262_144  # on the page, and of a sample
TARGET, SPECIAL = 1, 2  # bits of the kind of a part


@dataclass(frozen=True)
class _File:
    """The samples of a file, or of the last files of a key, adjacent in its dataset: those from `first` to before
    `stop`. label_names: of the labels of its samples, if any."""

    report: FileReport
    dataset: TokenizedDataset
    first: int
    stop: int
    label_names: Sequence[str]

    def name_sample(self, sample: int, sample_names: Sequence[str]) -> str:
        """Return what a sample of the dataset is among its kind; empty where all are alike."""
        if len(sample_names) > 1:
            return sample_names[(sample - self.first) % len(sample_names)]
        labels = self.dataset.sample_labels
        return "" if labels is None else describe_label(labels[sample], self.label_names)


def save_page(
    datasets: Mapping[str, Path],
    file: Path,
    *,
    title: str,
    tokenizer: PreTrainedTokenizerBase,
    sample_names: Sequence[str] = ("",),
    label_names: Sequence[str] = (),
) -> None:
    """Write the page. datasets: key -> tokenized folder. sample_names: of the samples of a record that belong together.
    label_names: of the labels of samples, if any."""
    files = _open_files(datasets, label_names)
    samples: list[dict] = []
    room = MOST_TOKENS
    per_file = max(LEAST_OF_FILE, MOST_SAMPLES // max(1, len(files)))
    for number, ids in _take_turns([_choose_samples(each, per_file, len(sample_names)) for each in files]):
        for sample in ids:
            described = _describe_sample(files[number], sample, tokenizer, sample_names)
            room -= described["tokens"]
            samples.append({"file": number, **described})
        if room <= 0:
            break
    samples.sort(key=lambda sample: (sample["file"], sample["number"]))
    file.parent.mkdir(parents=True, exist_ok=True)
    write_page(file, TEMPLATE, {"title": title, "files": [_describe_file(each) for each in files], "samples": samples})


def _open_files(datasets: Mapping[str, Path], label_names: Sequence[str]) -> list[_File]:
    opened = {key: TokenizedDataset(path, True, True) for key, path in datasets.items()}
    files, first = [], dict.fromkeys(datasets, 0)
    for report in merge_rest(list_files(datasets), MOST_FILES):
        stop = first[report.key] + report.counts.num_samples
        files.append(_File(report, opened[report.key], first[report.key], stop, label_names))
        first[report.key] = stop
    return files


def _choose_samples(file: _File, count: int, group_size: int) -> list[list[int]]:
    """Return up to `count` groups of samples, spread over the lengths; the longest first, then the shortest."""
    lengths = file.dataset.lengths[file.first : file.stop].reshape(-1, group_size).sum(axis=1)
    if not len(lengths):
        return []
    by_length = np.argsort(lengths, kind="stable")
    ranks = np.unique(np.linspace(0, len(lengths) - 1, max(2, count // group_size)).astype(int))
    chosen = by_length[ranks].tolist()
    alternating = [group for pair in zip(reversed(chosen), chosen) for group in pair][: len(chosen)]
    firsts = [file.first + group * group_size for group in dict.fromkeys(alternating)]
    return [list(range(first, first + group_size)) for first in firsts]


def _take_turns(chosen: Sequence[Sequence[list[int]]]) -> list[tuple[int, list[int]]]:
    """Return (number of the file, samples of a group), one group of each file in turn."""
    turns = max(map(len, chosen), default=0)
    return [
        (number, groups[turn]) for turn in range(turns) for number, groups in enumerate(chosen) if turn < len(groups)
    ]


def _describe_file(file: _File) -> dict[str, Any]:
    counts = file.report.counts
    bins, amounts = np.unique(
        np.log2(np.maximum(file.dataset.lengths[file.first : file.stop], 1)).astype(int), return_counts=True
    )
    return {
        "name": f"{file.report.key}: {file.report.file}",
        "records": counts.num_records,
        "samples": counts.num_samples,
        "tokens": counts.num_tokens,
        "targets": counts.num_targets,
        "shared": file.report.num_shared,
        "words": "\n".join(counts.describe_fate()),
        "lengths": list(zip(bins.tolist(), amounts.tolist(), strict=True)),
    }


def _describe_sample(
    file: _File, sample: int, tokenizer: PreTrainedTokenizerBase, sample_names: Sequence[str]
) -> dict[str, Any]:
    input_ids, labels = (read(sample)[:MOST_OF_SAMPLE] for read in (file.dataset.input_ids, file.dataset.labels))
    number = (sample - file.first) // len(sample_names)
    return {
        "number": number,
        "answer": file.name_sample(sample, sample_names),
        "length": int(file.dataset.lengths[sample]),
        "targets": int(file.dataset.num_targets[sample]),
        "cut": 0 if file.dataset.num_cut is None else int(file.dataset.num_cut[sample]),
        "tokens": len(input_ids),
        "parts": split_parts(input_ids, labels, tokenizer),
    }


def split_parts(
    input_ids: np.ndarray, labels: np.ndarray, tokenizer: PreTrainedTokenizerBase
) -> list[tuple[int, int, str]]:
    """Return (kind, number of tokens, text) of each run of tokens of one kind, `TARGET` and `SPECIAL` its bits."""
    is_target = labels != IGNORE_INDEX
    is_target[:1] = False  # nothing predicts the first token
    # The label of a turn's stop token may be another token than the template writes there.
    tokens = np.where(is_target, labels, input_ids)
    kinds = TARGET * is_target + SPECIAL * np.isin(tokens, tokenizer.all_special_ids)
    begins = np.flatnonzero(np.concatenate([[True], kinds[1:] != kinds[:-1]])).tolist()
    return [
        (int(kinds[begin]), end - begin, _decode(tokens, begin, end, tokenizer))
        for begin, end in zip(begins, [*begins[1:], len(input_ids)], strict=True)
    ]


def _decode(input_ids: np.ndarray, begin: int, end: int, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text of some tokens as it is after the token before them: alone, some tokenizers omit a space."""
    before = tokenizer.decode(input_ids[max(0, begin - 1) : begin])
    both = tokenizer.decode(input_ids[max(0, begin - 1) : end])
    return both[len(before) :] if both.startswith(before) else tokenizer.decode(input_ids[begin:end])
