"""Suspicious tokenized samples: exact duplicates, also between training and evaluation, samples without a target, and
outliers in length. Reported with their places; nothing is changed.

Reads each token once. Memory: about 50 bytes per sample, whatever its length.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from console import pluralize
from data.storage.file_report import shorten_source
from data.storage.tokenized import TokenizedDataset, load_summary

EXAMPLES = 5  # of each finding
FENCE = 3  # interquartile ranges beyond the quartiles, of the logarithm of the length


@dataclass(frozen=True)
class Inspected:
    """One file key. names: those of its entries. group_size: samples that belong together, 2 for a preference."""

    key: str
    path: Path
    names: Sequence[str]
    group_size: int = 1


def describe_findings(files: Sequence[Inspected], shown: Callable[[np.ndarray], str]) -> str:
    """Return the findings, each with up to `EXAMPLES` samples. shown: decodes the beginning of some token ids."""
    opened = {file.key: TokenizedDataset(file.path, True, True) for file in files}
    lines: list[str] = []

    ends = {file.key: np.cumsum([each.counts.num_samples for each in load_summary(file.path).files]) for file in files}

    def locate(file: Inspected, sample: int) -> str:
        dataset = opened[file.key]
        first = sample * file.group_size
        if dataset.places is None:
            source = int(dataset.sources[first])
            within = (first - int(np.searchsorted(dataset.sources, source))) // file.group_size
            return f"number {within:,} of {file.names[source]}"
        number = int(np.searchsorted(ends[file.key], first, side="right"))
        return f"{shorten_source(load_summary(file.path).files[number].name)}:{dataset.places[first]}"

    def name(file: Inspected, sample: int) -> str:
        first = opened[file.key].input_ids(sample * file.group_size)
        return f"{file.key} sample {sample:,} ({locate(file, sample)}): {shown(first)}"

    hashes = [hash_samples(opened[file.key], file.group_size) for file in files]
    lines += _describe_duplicates(files, hashes, name, locate)
    for file in files:
        dataset = opened[file.key]
        if len(empty := np.flatnonzero(np.asarray(dataset.num_targets) == 0)):
            lines.append(
                f"{file.key}: {len(empty):,} of {pluralize(len(dataset), 'sample')} without a target, which add no loss"
            )
            lines += [f"  {name(file, int(sample) // file.group_size)}" for sample in empty[:EXAMPLES]]
        lines += _describe_lengths(file, dataset.lengths, name)
    return "\n".join(lines) or "no duplicates, no samples without targets, no outliers in length"


def hash_samples(dataset: TokenizedDataset, group_size: int) -> np.ndarray:
    """Return a uint64 hash of each sample or group; equal tokens, labels and images have equal hashes."""
    hashes = np.empty(len(dataset) // group_size, np.uint64)
    for number in range(len(hashes)):
        state = xxhash.xxh3_64()
        for sample in range(number * group_size, (number + 1) * group_size):
            state.update(np.ascontiguousarray(dataset.input_ids(sample)).data)
            state.update(np.ascontiguousarray(dataset.labels(sample)).data)
            if dataset.attached_hashes is not None:
                state.update(dataset.attached_hashes[sample].tobytes())
        hashes[number] = state.intdigest()
    return hashes


Name = Callable[[Inspected, int], str]


def _describe_duplicates(
    files: Sequence[Inspected], hashes: Sequence[np.ndarray], name: Name, locate: Name
) -> list[str]:
    lines = []
    for file, own in zip(files, hashes, strict=True):
        order = np.argsort(own, kind="stable")
        repeats = order[1:][own[order[1:]] == own[order[:-1]]]  # all but the first of each kind
        if len(repeats):
            lines.append(f"{file.key}: {len(repeats):,} of {len(own):,} samples repeat an earlier one of the same file")
            firsts = order[np.searchsorted(own[order], own[repeats[:EXAMPLES]])]
            for sample, first in zip(repeats[:EXAMPLES].tolist(), firsts.tolist(), strict=True):
                lines.append(f"  {name(file, sample)} = {locate(file, first)}")
    for (file, own), (other, others) in [
        (one, two) for at, one in enumerate(zip(files, hashes)) for two in list(zip(files, hashes))[at + 1 :]
    ]:
        order = np.argsort(own, kind="stable")
        places = np.minimum(np.searchsorted(own[order], others), max(0, len(own) - 1))
        shared = np.flatnonzero(own[order[places]] == others) if len(own) else np.empty(0, np.int64)
        if len(shared):
            lines.append(
                f"{other.key}: {len(shared):,} of {len(others):,} samples are in {file.key} too, so the "
                "evaluation is contaminated"
            )
            lines += [
                f"  {name(other, int(sample))} = {file.key} {locate(file, int(order[places[sample]]))}"
                for sample in shared[:EXAMPLES]
            ]
    return lines


def _describe_lengths(file: Inspected, lengths: np.ndarray, name: Name) -> list[str]:
    logs = np.log(np.maximum(lengths, 1).astype(np.float32))
    low, high = np.percentile(logs, [25, 75])
    span = max(high - low, np.log(2) / FENCE)  # where most have one length, twice and half of it are not outliers
    bounds = {"shorter": low - FENCE * span, "longer": high + FENCE * span}
    lines = []
    for word, bound in bounds.items():
        far = np.flatnonzero(logs < bound if word == "shorter" else logs > bound)
        if not len(far):
            continue
        far = far[np.argsort(lengths[far], kind="stable")]
        shown = far[:EXAMPLES] if word == "shorter" else far[::-1][:EXAMPLES]
        lines.append(
            f"{file.key}: {pluralize(len(far), 'sample')} far {word} than the others ({np.exp(low):,.0f} to "
            f"{np.exp(high):,.0f} tokens for half of them)"
        )
        lines += [f"  {pluralize(lengths[s], 'token')}: {name(file, int(s) // file.group_size)}" for s in shown]
    return lines
