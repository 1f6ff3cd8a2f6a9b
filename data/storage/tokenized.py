"""A tokenized folder on disk, memory-mapped: one flat file per column, with a summary and the hashes of the files.

    input_ids, labels      int32 [num_tokens], the samples end to end
    offset                 int64 [num_samples + 1], where each of them begins
    length, num_targets    int32 [num_samples]; targets are counted after the shift
    num_prompt             int32 [num_samples], tokens before the answer, of a kind of data whose samples are answers
    num_cut                int32 [num_samples], tokens of it that were truncated
    place                  int32 [num_samples], the line, row or record of its file that it was made of; 0: unknown
    label, value           int32 or float64 [num_samples, K], of a kind of data whose samples have labels, or numbers
    source                 int32 [num_samples], the entry of `train_file` that the sample comes from
    skipped                text, a line for each record that was skipped as bad: its place and what is wrong with it
    record_hash            uint64 [num_records], of the records that became samples, or were dropped as too long

Opening it reads nothing and copies nothing into a process's own memory, whatever its size.
"""

import bisect
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Self

import numpy as np
import xxhash

from data.sources.indexed import IndexedCorpus
from data.storage.hashes import find_changed, write_hashes
from data.storage.summary import Summary

SUMMARY_FILE = "summary.json"
CORPORA_FILE = "corpora.json"  # of corpora that were tokenized elsewhere: their prefixes, in place of the token columns
TOKEN_COLUMNS = ("input_ids", "labels")
SAMPLE_COLUMNS = ("length", "num_targets", "source")
PROMPT_COLUMN, CUT_COLUMN, PLACE_COLUMN = "num_prompt", "num_cut", "place"
# Earlier versions had none of these, and their checkpoints name the hash of the others.
UNHASHED = (PROMPT_COLUMN, CUT_COLUMN, PLACE_COLUMN)
DTYPES: dict[str, np.dtype] = {
    **dict.fromkeys((*TOKEN_COLUMNS, *SAMPLE_COLUMNS), np.dtype(np.int32)),
    "offset": np.dtype(np.int64),
}
LABEL_DTYPES: dict[str, np.dtype] = {"label": np.dtype(np.int32), "value": np.dtype(np.float64)}
SKIPPED_FILE = "skipped.txt"
HASHES_COLUMN, HASH_DTYPE = "record_hash", np.dtype(np.uint64)
BYTES_PER_TOKEN = sum(DTYPES[name].itemsize for name in TOKEN_COLUMNS)
BYTES_PER_SAMPLE = sum(DTYPES[name].itemsize for name in (*SAMPLE_COLUMNS, "offset"))
BYTES_PER_SAMPLE += 2 * np.dtype(np.int32).itemsize  # num_cut and place


def load_summary(path: str | Path) -> Summary:
    """Return the summary of a tokenized folder. Raises FileNotFoundError where there is none."""
    return Summary.from_json((Path(path) / SUMMARY_FILE).read_text())


def find_damage(path: Path, compares_bytes: bool) -> str | None:
    """Return why a tokenized folder cannot be read; None when it is whole. compares_bytes: read every byte; otherwise
    compare sizes alone."""
    try:
        load_summary(path)
        return find_changed(path, compares_bytes)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"


def column_file(path: str | Path, name: str) -> Path:
    """Return the file of a column of a tokenized folder."""
    return Path(path) / f"{name}.bin"


def map_column(path: str | Path, name: str, dtype: np.dtype) -> np.ndarray:
    """Return a column of a tokenized folder, memory-mapped: flat, in its order on disk."""
    return np.asarray(np.memmap(column_file(path, name), dtype, mode="r"))  # a memmap is an array that is slow to slice


def load_record_hashes(path: str | Path) -> np.ndarray | None:
    """Return the hashes of a tokenized folder's records, memory-mapped, in the order of its files; None for corpora
    that were tokenized elsewhere, which have no records."""
    if not column_file(path, HASHES_COLUMN).is_file():
        return None
    return map_column(path, HASHES_COLUMN, HASH_DTYPE)


def read_skipped(path: str | Path) -> Iterator[str]:
    """Yield the messages of a tokenized folder's records that were skipped as bad, in the order of its files."""
    file = Path(path) / SKIPPED_FILE
    if file.is_file():
        with open(file, encoding="utf-8") as lines:
            yield from (line.rstrip("\n") for line in lines)


class TokenizedWriter:
    """Writes a tokenized folder, some samples at a time. A context manager that closes the files.

    num_samples, num_tokens, num_targets: written so far. `finish` makes the folder whole.
    """

    def __init__(self, path: Path, num_sources: int) -> None:
        self._path = path
        self._hashes = [xxhash.xxh3_64() for _ in range(num_sources)]
        self.num_samples = self.num_tokens = self.num_targets = 0

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._files = {name: stack.enter_context(open(column_file(self._path, name), "wb")) for name in DTYPES}
            self._stack = stack.pop_all()
        self._write("offset", np.zeros(1, np.int64))
        return self

    def __exit__(self, *raised: object) -> None:
        self._stack.close()

    def append(self, columns: Mapping[str, np.ndarray], source: int) -> None:
        """Write the samples of entry `source`. columns: of an `EncodedBatch`."""
        lengths = columns["length"]
        for name, values in columns.items():
            self._write(name, values)
            if name not in UNHASHED:
                self._hashes[source].update(values.data)
        self._write("source", np.full(len(lengths), source, np.int32))
        self._write("offset", self.num_tokens + np.cumsum(lengths, dtype=np.int64))
        self.num_samples += len(lengths)
        self.num_tokens += len(columns["input_ids"])
        self.num_targets += int(columns["num_targets"].sum(dtype=np.int64))

    def append_hashes(self, hashes: np.ndarray) -> None:
        """Write the hashes of some records, uint64."""
        self._write(HASHES_COLUMN, hashes)

    def append_skipped(self, messages: Sequence[str]) -> None:
        """Write the messages of records that were skipped as bad."""
        if messages:
            with open(self._path / SKIPPED_FILE, "a", encoding="utf-8") as file:
                file.writelines(f"{' '.join(message.split())}\n" for message in messages)

    def append_lengths(self, lengths: np.ndarray, source: int) -> None:
        """Write documents whose tokens are stored elsewhere, all but the first targets. lengths: int64, 1 or more."""
        self._write("length", lengths.astype(np.int32))
        self._write("num_targets", (lengths - 1).astype(np.int32))
        self._write("source", np.full(len(lengths), source, np.int32))
        self._write("offset", self.num_tokens + np.cumsum(lengths, dtype=np.int64))
        self._hashes[source].update(lengths.data)
        self.num_samples += len(lengths)
        self.num_tokens += int(lengths.sum())
        self.num_targets += int(lengths.sum()) - len(lengths)

    def add_to_fingerprint(self, tokens: np.ndarray, source: int) -> None:
        """Hash tokens of entry `source` that are stored elsewhere."""
        self._hashes[source].update(tokens.data)

    def _write(self, name: str, values: np.ndarray) -> None:
        if name not in self._files:  # a column that not every kind of data has
            self._files[name] = self._stack.enter_context(open(column_file(self._path, name), "wb"))
        self._files[name].write(values.data)

    @property
    def fingerprints(self) -> list[str]:
        """A hash of the samples of each entry: equal samples have equal hashes, wherever they came from."""
        return [state.hexdigest() for state in self._hashes]

    def finish(self, summary: Summary) -> None:
        """Write the summary and the hashes, which make the folder whole; it is on the disk on return."""
        for file in self._files.values():
            file.flush()
        (self._path / SUMMARY_FILE).write_text(summary.to_json())
        write_hashes(self._path)


class CorpusTokens:
    """The tokens of several corpora end to end, int32; each slice must lie within one corpus."""

    def __init__(self, folder: Path) -> None:
        corpora = [IndexedCorpus(prefix) for prefix in json.loads((folder / CORPORA_FILE).read_text())]
        filled = [corpus for corpus in corpora if os.path.getsize(corpus.bin_file)]  # no empty file can be mapped
        self._tokens = [np.memmap(corpus.bin_file, corpus.dtype, mode="r") for corpus in filled]
        self._firsts = [0, *np.cumsum([len(tokens) for tokens in self._tokens]).tolist()]

    def __getitem__(self, place: slice) -> np.ndarray:
        number = bisect.bisect_right(self._firsts, place.start) - 1
        first = self._firsts[number]
        return np.asarray(self._tokens[number][place.start - first : place.stop - first]).astype(np.int32)


class TokenizedDataset:
    """A tokenized folder, memory-mapped: a rank reads only its own columns, and lengths and target counts."""

    def __init__(self, path: str | Path, reads_inputs: bool, reads_labels: bool) -> None:
        self._arguments = (path, reads_inputs, reads_labels)
        self._offsets = map_column(path, "offset", DTYPES["offset"])  # [num_samples + 1]
        self.lengths, self.num_targets, self.sources = (
            map_column(path, name, DTYPES[name]) for name in SAMPLE_COLUMNS
        )  # [num_samples]
        wanted = [name for name, reads in zip(TOKEN_COLUMNS, (reads_inputs, reads_labels)) if reads]
        self._columns: dict[str, np.ndarray | CorpusTokens]
        if (Path(path) / CORPORA_FILE).is_file():  # the labels are the tokens themselves
            self._columns = dict.fromkeys(wanted, CorpusTokens(Path(path)))
        else:
            self._columns = {name: map_column(path, name, DTYPES[name]) for name in wanted}

    def __reduce__(self) -> tuple:
        # A worker process that is spawned opens the folder itself: pickling the views would copy the data.
        return type(self), self._arguments

    def __len__(self) -> int:
        return len(self.lengths)

    @cached_property
    def sample_labels(self) -> np.ndarray | None:
        """The labels of the samples, [num_samples, K]; None where not every sample has as many, and for pairs."""
        path = self._arguments[0]
        for name, dtype in LABEL_DTYPES.items():
            if column_file(path, name).is_file():
                labels = map_column(path, name, dtype)
                return None if len(labels) % len(self) else labels.reshape(len(self), -1)
        return None

    @cached_property
    def num_prompt(self) -> np.ndarray:
        """The number of tokens before the answer of each sample, int32 [num_samples]."""
        return map_column(self._arguments[0], PROMPT_COLUMN, np.dtype(np.int32))

    @cached_property
    def places(self) -> np.ndarray | None:
        """The line, row or record that each sample was made of, int32 [num_samples]; None for corpora that were
        tokenized elsewhere."""
        return self._map_optional(PLACE_COLUMN)

    @cached_property
    def num_cut(self) -> np.ndarray | None:
        """The tokens of each sample that were truncated, int32 [num_samples]; None for corpora that were tokenized
        elsewhere."""
        return self._map_optional(CUT_COLUMN)

    def _map_optional(self, name: str) -> np.ndarray | None:
        path = self._arguments[0]
        return map_column(path, name, np.dtype(np.int32)) if column_file(path, name).is_file() else None

    @property
    def desirable(self) -> np.ndarray:
        """Whether each sample is desirable, by its label, bool [num_samples]; of pairs the chosen one is."""
        labels = self.sample_labels
        return np.arange(len(self)) % 2 == 0 if labels is None else labels[:, 0] != 0

    def input_ids(self, index: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Return the tokens of a sample, from `start` to before `stop`: a sample may be a whole corpus, which is not
        read for one row of it."""
        return self._read("input_ids", index, start, stop)

    def labels(self, index: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Return the labels of a sample, as `input_ids` does."""
        return self._read("labels", index, start, stop)

    def _read(self, name: str, index: int, start: int, stop: int | None) -> np.ndarray:
        if name not in self._columns:
            raise RuntimeError(f"this rank does not hold {name}: the dataset was opened without that column")
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        first, end = self._offsets[index : index + 2]
        return self._columns[name][first + start : end if stop is None else min(end, first + stop)]
