"""How messages name the samples of a tokenized folder: by their files, and the records that they were made from."""

from pathlib import Path

import numpy as np

from data.storage.file_report import shorten_source
from data.storage.tokenized import TokenizedDataset, load_summary

_MOST_SAMPLES = 64  # that a message names


def name_sample(path: Path, sample: int) -> str:
    """Return file and number of a sample, and the line, row or record that it was made from. sample: its number in the
    folder, from 0."""
    files, places = load_summary(path).files, TokenizedDataset(path, False, False).places
    ends = np.cumsum([file.counts.num_samples for file in files])
    number = int(np.searchsorted(ends, sample, side="right"))
    own = sample - (int(ends[number - 1]) if number else 0)
    record = "" if places is None else f", from its line or record {places[sample]},"
    return f"{shorten_source(files[number].name)}: sample {own} (counted from 0){record}"


def name_samples(path: Path, samples: np.ndarray) -> str:
    """Return the files of samples, each with the lines, rows or records that its samples were made from; with their
    numbers in it if the folder does not have those. samples: numbers in the folder, from 0; repeated ones count once.
    """
    files, places = load_summary(path).files, TokenizedDataset(path, False, False).places
    firsts = np.cumsum([0, *(file.counts.num_samples for file in files)])
    different = np.unique(samples)
    named = different[:_MOST_SAMPLES]
    numbers = np.searchsorted(firsts, named, side="right") - 1
    texts = []
    for number in np.unique(numbers):
        own = named[numbers == number]
        if places is None:
            what = f", samples {_list(own - firsts[number])} (counted from 0)"
        else:
            what = f", lines or records {_list(np.unique(places[own]))}" if places[own].any() else ""  # one record
        texts.append(shorten_source(files[number].name) + what)
    if len(different) > len(named):
        texts.append(f"{len(different) - len(named)} more samples")
    return "; ".join(texts)


def _list(numbers: np.ndarray) -> str:
    return ", ".join(map(str, numbers))
