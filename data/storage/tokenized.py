"""A tokenized folder: the samples of some files as token ids on disk, written once and memory-mapped by every rank.

Each column is a flat binary file, NAME.bin:

    input_ids      int32 [num_tokens]        the token ids of all samples, end to end
    labels         int32 [num_tokens]        the token id where a token is a target, else -100; not shifted. If tokens
                                             are classified, the class of the token before stands for the token id
    offset         int64 [num_samples + 1]   the place in input_ids and labels at which each sample begins; the last
                                             value is num_tokens
    length         int32 [num_samples]       the number of tokens
    num_targets    int32 [num_samples]       the number of targets after the shift; 1 if the whole sample has labels
    source         int32 [num_samples]       the number of the entry of `train_file` that it comes from, from 0
    num_cut        int32 [num_samples]       the number of tokens that were truncated
    place          int32 [num_samples]       the number of its line, row or record in its file, as error messages count
                                             it; 0 if a file is one record
    num_prompt     int32 [num_samples]       the number of tokens before the answer, if samples are answers to a prompt
    label          int32 [num_samples, K]    K labels of the whole sample, if the kind of data has them
    value          float64 [num_samples, K]  the same for labels that are numbers
    attached       uint8 [num_bytes]         the attachments of all samples, end to end, if the kind of data has some:
                                             a JSON list of [first token, token after the last, content] of each
    attached_length  int32 [num_samples]     the bytes of each sample's
    attached_hash  uint64 [num_samples]      the hash of each sample's, wherever the files that they name lie
    record_hash    uint64 [num_records]      the hash of each record that became samples, or was dropped as too long

Other files: summary.json has the counts (`data/storage/summary.py`), hashes.json the size and the hash of each file
(`data/storage/hashes.py`), and skipped.txt one line for each record that was skipped as bad: its place and what is
wrong with it. For corpora that were tokenized elsewhere, corpora.json names the files with the tokens, and there are
only `offset`, `length`, `num_targets` and `source`.

Opening a folder maps its columns. It copies none of them into the memory of the process, whatever their size.
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

from data.sample import Attachment
from data.sources.indexed import IndexedCorpus
from data.storage.hashes import find_changed, write_hashes
from data.storage.summary import Summary

SUMMARY_FILE = "summary.json"
# A list of paths without suffix (`IndexedCorpus.prefix`), one per corpus that was tokenized elsewhere. The folder then
# has no token columns.
CORPORA_FILE = "corpora.json"
SAMPLES_AT_A_TIME = 2**12  # that are read together to check their ids
TOKEN_COLUMNS = ("input_ids", "labels")
SAMPLE_COLUMNS = ("length", "num_targets", "source")  # those that every folder has, in addition to `offset`
PROMPT_COLUMN, CUT_COLUMN, PLACE_COLUMN = "num_prompt", "num_cut", "place"
ATTACHED_COLUMN, ATTACHED_LENGTH_COLUMN, ATTACHED_HASH_COLUMN = "attached", "attached_length", "attached_hash"
# Columns that are not in `TokenizedWriter.fingerprints`. A checkpoint stores the fingerprints of its data, and those of
# versions that did not write the first of these columns have to match; the others name files, which may be moved.
UNHASHED = (PROMPT_COLUMN, CUT_COLUMN, PLACE_COLUMN, ATTACHED_COLUMN, ATTACHED_LENGTH_COLUMN)
DTYPES: dict[str, np.dtype] = {  # of the columns that a writer creates from the start
    **dict.fromkeys((*TOKEN_COLUMNS, *SAMPLE_COLUMNS), np.dtype(np.int32)),
    "offset": np.dtype(np.int64),
}
# The columns for labels of whole samples, of which a folder has at most one
LABEL_DTYPES: dict[str, np.dtype] = {"label": np.dtype(np.int32), "value": np.dtype(np.float64)}
SKIPPED_FILE = "skipped.txt"
HASHES_COLUMN, HASH_DTYPE = "record_hash", np.dtype(np.uint64)
# The bytes on disk that a token and a sample take, without num_prompt, labels and hashes of records
BYTES_PER_TOKEN = sum(DTYPES[name].itemsize for name in TOKEN_COLUMNS)
BYTES_PER_SAMPLE = sum(DTYPES[name].itemsize for name in (*SAMPLE_COLUMNS, "offset"))
BYTES_PER_SAMPLE += 2 * np.dtype(np.int32).itemsize  # num_cut and place


def write_attachments(attachments: Sequence[Attachment]) -> bytes:
    """Return the attachments of a sample as the folder stores them."""
    return json.dumps(attachments, ensure_ascii=False, separators=(",", ":")).encode()


def load_summary(path: str | Path) -> Summary:
    """Return the summary of a tokenized folder. Raises FileNotFoundError if there is none, and ValueError, KeyError or
    TypeError if it is damaged."""
    return Summary.from_json((Path(path) / SUMMARY_FILE).read_text())


def find_damage(path: Path, compares_bytes: bool) -> str | None:
    """Return, in words, why a tokenized folder cannot be used: it is missing, or a file has changed since it was
    written. None if it is whole. compares_bytes: whether the bytes of every file are compared with their hash;
    otherwise only the sizes are compared."""
    try:
        load_summary(path)
        return find_changed(path, compares_bytes)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"


def column_file(path: str | Path, name: str) -> Path:
    """Return the path of the file of column `name` in the tokenized folder `path`, whether it exists or not."""
    return Path(path) / f"{name}.bin"


def map_column(path: str | Path, name: str, dtype: np.dtype) -> np.ndarray:
    """Return column `name` of a tokenized folder, memory-mapped and one-dimensional, also for `label` and `value`.
    dtype: that of the column. Raises FileNotFoundError if the folder does not have the column, and ValueError if it is
    empty."""
    return np.asarray(np.memmap(column_file(path, name), dtype, mode="r"))  # a memmap is an array that is slow to slice


def load_record_hashes(path: str | Path) -> np.ndarray | None:
    """Return the hashes of the records of a tokenized folder, memory-mapped, uint64 [num_records], in the order in
    which the records were read. None for corpora that were tokenized elsewhere, which have no records."""
    if not column_file(path, HASHES_COLUMN).is_file():
        return None
    return map_column(path, HASHES_COLUMN, HASH_DTYPE)


def read_skipped(path: str | Path) -> Iterator[str]:
    """Yield the message of each record that was skipped as bad, in the order in which the records were read: its place
    and what is wrong with it. Yields nothing if none was skipped."""
    file = Path(path) / SKIPPED_FILE
    if file.is_file():
        with open(file, encoding="utf-8") as lines:
            yield from (line.rstrip("\n") for line in lines)


class TokenizedWriter:
    """Writes a tokenized folder, some samples at a time. It is a context manager: the files are open within its block.
    `finish`, the last call, makes the folder whole. A folder without it counts as damaged.
    """

    def __init__(self, path: Path, num_sources: int) -> None:
        """path: a folder that exists. num_sources: the number of entries of `train_file`."""
        self._path = path
        self._hashes = [xxhash.xxh3_64() for _ in range(num_sources)]
        self.num_samples = self.num_tokens = self.num_targets = 0  # written so far, by all entries

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._files = {name: stack.enter_context(open(column_file(self._path, name), "wb")) for name in DTYPES}
            self._stack = stack.pop_all()
        self._write("offset", np.zeros(1, np.int64))
        return self

    def __exit__(self, *raised: object) -> None:
        self._stack.close()

    def append(self, columns: Mapping[str, np.ndarray], source: int) -> None:
        """Write samples. columns: those of an `EncodedBatch` (`data/storage/encoding.py`), at least input_ids, labels,
        length and num_targets; each call has the same ones. source: the number of the entry that the samples come from,
        from 0."""
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
        """Write the hashes of records, uint64 [number of records]."""
        self._write(HASHES_COLUMN, hashes)

    def append_skipped(self, messages: Sequence[str]) -> None:
        """Write the messages of records that were skipped as bad, each on one line. The file is made by the first
        one."""
        if messages:
            with open(self._path / SKIPPED_FILE, "a", encoding="utf-8") as file:
                file.writelines(f"{' '.join(message.split())}\n" for message in messages)

    def append_lengths(self, lengths: np.ndarray, source: int) -> None:
        """Write samples whose tokens are stored elsewhere. Each is a document, and all its tokens but the first are
        targets. lengths: int64 [number of documents], the tokens of each, 1 or more. source: as in `append`."""
        self._write("length", lengths.astype(np.int32))
        self._write("num_targets", (lengths - 1).astype(np.int32))
        self._write("source", np.full(len(lengths), source, np.int32))
        self._write("offset", self.num_tokens + np.cumsum(lengths, dtype=np.int64))
        self._hashes[source].update(lengths.data)
        self.num_samples += len(lengths)
        self.num_tokens += int(lengths.sum())
        self.num_targets += int(lengths.sum()) - len(lengths)

    def add_to_fingerprint(self, tokens: np.ndarray, source: int) -> None:
        """Add tokens that are stored elsewhere to the fingerprint of entry `source`. tokens: int32, the next ones of
        the entry, in order."""
        self._hashes[source].update(tokens.data)

    def _write(self, name: str, values: np.ndarray) -> None:
        if name not in self._files:  # a column that not every kind of data has
            self._files[name] = self._stack.enter_context(open(column_file(self._path, name), "wb"))
        self._files[name].write(values.data)

    @property
    def fingerprints(self) -> list[str]:
        """A hash for each entry, of its samples so far, 16 hex digits. It does not depend on the names and places of
        files. Entries with equal hashes have equal samples; equal samples may have different hashes if they were
        written in other batches, as after a filter that drops other records."""
        return [state.hexdigest() for state in self._hashes]

    def finish(self, summary: Summary) -> None:
        """Write the summary and the hashes of all files, which make the folder whole. On return everything is flushed
        to the disk."""
        for file in self._files.values():
            file.flush()
        (self._path / SUMMARY_FILE).write_text(summary.to_json())
        write_hashes(self._path)


class CorpusTokens:
    """The token ids of several corpora that were tokenized elsewhere, as if they were one array, end to end.

    Indexed with a slice (start and stop, no step), it returns a copy of these tokens, int32 [stop - start]. A slice
    must lie within one corpus, as that of a document does.
    """

    def __init__(self, folder: Path) -> None:
        """folder: a tokenized folder with `CORPORA_FILE`. Raises UserError if the index of a corpus cannot be read."""
        prefixes = json.loads((folder / CORPORA_FILE).read_text())
        if any(not os.path.isabs(prefix) for prefix in prefixes):  # version 1.1 wrote them as they were given
            prefixes = [file.name.removesuffix(".bin") for file in load_summary(folder).files]
        corpora = [IndexedCorpus(prefix) for prefix in prefixes]
        filled = [corpus for corpus in corpora if os.path.getsize(corpus.bin_file)]  # no empty file can be mapped
        self._tokens = [np.memmap(corpus.bin_file, corpus.dtype, mode="r") for corpus in filled]
        self._firsts = [0, *np.cumsum([len(tokens) for tokens in self._tokens]).tolist()]

    def __getitem__(self, place: slice) -> np.ndarray:
        number = bisect.bisect_right(self._firsts, place.start) - 1
        first = self._firsts[number]
        return np.asarray(self._tokens[number][place.start - first : place.stop - first]).astype(np.int32)


class TokenizedDataset:
    """A tokenized folder, memory-mapped. A rank opens only the token columns that it needs; the columns with one value
    per sample are there on every rank. Samples are numbered from 0 to `len(dataset) - 1`.

    Its pickle holds only the arguments: a process that unpickles it opens the folder again.
    """

    def __init__(self, path: str | Path, reads_inputs: bool, reads_labels: bool) -> None:
        """reads_inputs: whether `input_ids` can be called. reads_labels: whether `labels` can be called. Raises
        FileNotFoundError if a column is missing; `find_damage` checks the folder."""
        self._arguments = (path, reads_inputs, reads_labels)
        self._offsets = map_column(path, "offset", DTYPES["offset"])  # [num_samples + 1]
        # The tokens of each sample, its targets after the shift, and the number of the entry of `train_file` that it
        # comes from, counted from 0: int32 [num_samples] each.
        self.lengths, self.num_targets, self.sources = (map_column(path, name, DTYPES[name]) for name in SAMPLE_COLUMNS)
        wanted = [name for name, reads in zip(TOKEN_COLUMNS, (reads_inputs, reads_labels)) if reads]
        self._columns: dict[str, np.ndarray | CorpusTokens]
        if (Path(path) / CORPORA_FILE).is_file():  # the labels are the tokens themselves
            self._columns = dict.fromkeys(wanted, CorpusTokens(Path(path)))
        else:
            self._columns = {name: map_column(path, name, DTYPES[name]) for name in wanted}

    def __reduce__(self) -> tuple:
        # A worker process that is spawned opens the folder itself: a pickle of the mapped columns would copy them.
        return type(self), self._arguments

    def __len__(self) -> int:
        return len(self.lengths)

    @cached_property
    def sample_labels(self) -> np.ndarray | None:
        """The labels of whole samples, int32 or float64 [num_samples, K]. None if the kind of data has none, as pairs
        have none, or if their number is not a multiple of `num_samples`."""
        path = self._arguments[0]
        for name, dtype in LABEL_DTYPES.items():
            if column_file(path, name).is_file():
                labels = map_column(path, name, dtype)
                return None if len(labels) % len(self) else labels.reshape(len(self), -1)
        return None

    @cached_property
    def _attached(self) -> tuple[np.ndarray, np.ndarray]:
        """The column of attachments, and where those of each sample begin, int64 [num_samples + 1]."""
        path = self._arguments[0]
        lengths = map_column(path, ATTACHED_LENGTH_COLUMN, np.dtype(np.int32))
        ends = np.cumsum(lengths, dtype=np.int64)
        return map_column(path, ATTACHED_COLUMN, np.dtype(np.uint8)), np.concatenate([np.zeros(1, np.int64), ends])

    def attachments(self, index: int) -> list[Attachment]:
        """Return the attachments of sample `index`, in their order. Raises FileNotFoundError for a kind of data without
        them."""
        column, offsets = self._attached
        first, end = offsets[index : index + 2]
        return [Attachment(*each) for each in json.loads(column[first:end].tobytes())]

    @cached_property
    def attached_hashes(self) -> np.ndarray | None:
        """The hash of the attachments of each sample, uint64 [num_samples]. None for a kind of data without them."""
        path = self._arguments[0]
        found = column_file(path, ATTACHED_HASH_COLUMN).is_file()
        return map_column(path, ATTACHED_HASH_COLUMN, HASH_DTYPE) if found else None

    @cached_property
    def num_prompt(self) -> np.ndarray:
        """The number of tokens before the answer of each sample, int32 [num_samples]. Raises FileNotFoundError for a
        kind of data whose samples are not answers to a prompt."""
        return map_column(self._arguments[0], PROMPT_COLUMN, np.dtype(np.int32))

    @cached_property
    def places(self) -> np.ndarray | None:
        """The number of the line, row or record that each sample was made from, int32 [num_samples], as error messages
        count it; 0 if a file is one record. None if the folder does not have the column, as for corpora that were
        tokenized elsewhere."""
        return self._map_optional(PLACE_COLUMN)

    @cached_property
    def num_cut(self) -> np.ndarray | None:
        """The number of tokens that were truncated from each sample, int32 [num_samples]. None if the folder does not
        have the column, as for corpora that were tokenized elsewhere."""
        return self._map_optional(CUT_COLUMN)

    def find_id_beyond(self, rows: int) -> tuple[int, int] | None:
        """Return the first sample with a token id below 0, or of `rows` or more, and that id; None without one. Raises
        KeyError if the dataset was opened without `input_ids`."""
        tokens = self._columns["input_ids"]
        step = 1 if isinstance(tokens, CorpusTokens) else SAMPLES_AT_A_TIME  # a slice of those lies within one corpus
        for first in range(0, len(self), step):
            start, stop = (int(self._offsets[sample]) for sample in (first, min(first + step, len(self))))
            ids = tokens[start:stop]
            wrong = np.flatnonzero((ids < 0) | (ids >= rows))
            if len(wrong):
                sample = np.searchsorted(self._offsets, start + wrong[0], side="right") - 1
                return int(sample), int(ids[wrong[0]])
        return None

    def _map_optional(self, name: str) -> np.ndarray | None:
        """Return an int32 column; None if the folder does not have it."""
        path = self._arguments[0]
        return map_column(path, name, np.dtype(np.int32)) if column_file(path, name).is_file() else None

    def input_ids(self, index: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Return the token ids of sample `index`, int32, from token `start` to before token `stop`; None means to its
        end. Only these are read, since a sample may be a long document that fills many rows. A `stop` beyond the end of
        the sample means its end.

        Raises IndexError if there is no such sample, and RuntimeError if the dataset was opened without this column.
        """
        return self._read("input_ids", index, start, stop)

    def labels(self, index: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Return the labels of sample `index`, int32, -100 where a token is not a target; not shifted. Arguments and
        errors are those of `input_ids`. For corpora that were tokenized elsewhere, the labels are the token ids
        themselves."""
        return self._read("labels", index, start, stop)

    def _read(self, name: str, index: int, start: int, stop: int | None) -> np.ndarray:
        if name not in self._columns:
            raise RuntimeError(f"this rank does not hold {name}: the dataset was opened without that column")
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        first, end = self._offsets[index : index + 2]
        return self._columns[name][first + start : end if stop is None else min(end, first + stop)]
