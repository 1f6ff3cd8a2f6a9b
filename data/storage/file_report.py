"""Describes what became of the records of each file, for the screen before the first step.

Counts come from the summaries of the tokenized folders; only the hashes of records are read, 8 bytes each. Memory: 30
bytes per evaluation record, whatever the training files hold.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from data.components import TARGET
from data.sources.records import COMPONENT_PREFIX
from data.storage.summary import BatchCounts, FileCounts, sum_counts
from data.storage.tokenized import load_record_hashes, load_summary, read_skipped

MOST_FILES = 8  # of a key that are shown on their own
WINDOW = 2**20  # hashes that are compared at a time


@dataclass(frozen=True)
class FileReport:
    """One file of a key. num_shared: its records that the training files hold too; None where that is not known."""

    key: str
    file: str
    counts: BatchCounts
    num_shared: int | None = None

    def describe(self) -> str:
        """Return the counts in words, on several lines."""
        words = self.counts.describe()
        if self.counts.num_skipped > 1:
            words += "\nskipped.txt in output_dir lists all that were skipped"
        if not self.num_shared:
            return words
        return f"{words}\n{self.num_shared:,} of its records are in train_file too, so the evaluation is contaminated"


def list_files(datasets: Mapping[str, Path]) -> list[FileReport]:
    """Return what became of the records of each file. datasets: key -> tokenized folder."""
    train = load_record_hashes(datasets["train_file"]) if "train_file" in datasets else None
    reports: list[FileReport] = []
    for key, path in datasets.items():
        files = load_summary(path).files
        hashes = load_record_hashes(path)
        shared: Sequence[int | None] = [None] * len(files)
        if key != "train_file" and train is not None and hashes is not None:
            shared = _count_shared(train, hashes, files)
        reports += [
            FileReport(key, shorten_source(file.name), file.counts, number)
            for file, number in zip(files, shared, strict=True)
        ]
    return reports


def shorten_source(source: str) -> str:
    """Return the name of a source: of a user-defined function without its arguments, of a file from the working
    directory on."""
    if source.startswith(COMPONENT_PREFIX):
        return str(json.loads(source.removeprefix(COMPONENT_PREFIX))[TARGET])
    return source.removeprefix(f"{Path.cwd()}/")


def _count_shared(train: np.ndarray, hashes: np.ndarray, files: Sequence[FileCounts]) -> list[int]:
    """Return how many records of each file are among the training records. hashes: of the records of all files."""
    different, numbers = np.unique(hashes, return_inverse=True)
    if not len(different):
        return [0] * len(files)
    is_shared = np.zeros(len(different), bool)
    for start in range(0, len(train), WINDOW):
        window = train[start : start + WINDOW]
        places = np.minimum(np.searchsorted(different, window), len(different) - 1)
        is_shared[places[different[places] == window]] = True
    ends = np.cumsum([file.counts.num_encoded for file in files])
    return [int(np.count_nonzero(part)) for part in np.split(is_shared[numbers], ends[:-1])]


def save_skipped(datasets: Mapping[str, Path], file: Path) -> None:
    """Write a line for each record that was skipped as bad: key, place and what is wrong with it. Lines of other keys
    stay, such as those of the run whose checkpoint is evaluated; no file where none is left. datasets: key -> tokenized
    folder."""
    before = file.read_text(encoding="utf-8").split("\n") if file.is_file() else []
    kept = (f"{line}\n" for line in before if line and line.partition(": ")[0] not in datasets)
    new = (f"{key}: {message}\n" for key, path in datasets.items() for message in read_skipped(path))
    file.unlink(missing_ok=True)
    for line in chain(kept, new):
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(file, "a", encoding="utf-8") as lines:
            lines.write(line)


def merge_rest(reports: Sequence[FileReport], most: int = MOST_FILES) -> list[FileReport]:
    """Return the reports with those of each key beyond the first `most` summed up as one."""
    merged = []
    for key in dict.fromkeys(report.key for report in reports):
        own = [report for report in reports if report.key == key]
        shown, rest = (own, []) if len(own) <= most else (own[: most - 1], own[most - 1 :])
        merged += shown
        if rest:
            known = [report.num_shared for report in rest if report.num_shared is not None]
            counts = sum_counts(report.counts for report in rest)
            merged.append(FileReport(key, f"{len(rest):,} more files", counts, sum(known) if known else None))
    return merged


def describe_files(datasets: Mapping[str, Path]) -> dict[str, str]:
    """Return what became of the records of each file: key, numbered where it has several -> lines. datasets: key ->
    tokenized folder."""
    merged = merge_rest(list_files(datasets))
    facts: dict[str, str] = {}
    for key in dict.fromkeys(report.key for report in merged):
        reports = [report for report in merged if report.key == key]
        names = [key] if len(reports) == 1 else [f"{key} {number}" for number in range(1, len(reports) + 1)]
        facts |= {name: f"{report.file}: {report.describe()}" for name, report in zip(names, reports, strict=True)}
    return facts
