"""Megatron's tokenized corpora: `NAME.bin`, token ids end to end, and `NAME.idx`, where each document begins.

    9 bytes   MMIDIDX and two zeros
    uint64    version, 1
    uint8     dtype of the ids, a key of DTYPES
    uint64    S sequences
    uint64    D document boundaries
    int32 [S] tokens of each sequence
    int64 [S] where it begins in the .bin, in bytes
    int64 [D] the first sequence of each document, and S at the end
    int8  [S] modes, in corpora of more than text; not read

All little-endian. Both files are memory-mapped and never copied; nothing is added, so documents have an end token only
if the data has one (`--append-eod` of Megatron's tool).
"""

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from errors import UserError
from filesystem import hash_ends

PREFIX = "indexed:"  # of a source: indexed:path/NAME
SUFFIXES = (".bin", ".idx")
MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}
WINDOW = 2**20  # sequences or documents that are read at a time
TOKENS_AT_A_TIME = 2**24


def find_prefix(path: str) -> str | None:
    """Return the path without suffix of the corpus that `path` names by its .bin, its .idx, or without suffix; None for
    another file. Raises `UserError` where one of the two files is missing.
    """
    root, suffix = os.path.splitext(path)
    if suffix in SUFFIXES and os.path.isfile(path):
        for other in SUFFIXES:
            if not os.path.isfile(root + other):
                raise UserError(f"{path} has no {root + other} next to it; a tokenized corpus is both, copy it too")
        return root
    if not os.path.exists(path) and all(os.path.isfile(path + suffix) for suffix in SUFFIXES):
        return path
    return None


@dataclass(frozen=True)
class IndexedCorpus:
    """One corpus. prefix: its path without suffix. Reading it raises `UserError` when the two files do not match."""

    prefix: str

    @property
    def bin_file(self) -> str:
        return self.prefix + ".bin"

    @cached_property
    def _header(self) -> tuple[np.dtype, int, int]:
        """(dtype, sequences, document boundaries)"""
        idx = self.prefix + ".idx"
        size = os.path.getsize(idx)
        with open(idx, "rb") as file:
            head = file.read(HEADER.size)
        if len(head) < HEADER.size or not head.startswith(MAGIC):
            raise UserError(
                f"{idx} does not begin with MMIDIDX: it is not an index that Megatron's IndexedDataset writes; give "
                "the .bin and .idx of preprocess_data.py, or text"
            )
        _, version, code, sequences, boundaries = HEADER.unpack(head)
        if version != 1:
            raise UserError(f"{idx} has version {version}, only 1 is known; write it with a Megatron that has that")
        if code not in DTYPES or DTYPES[code].startswith("float"):
            holds = DTYPES.get(code, "no known dtype")
            raise UserError(f"{idx} has dtype code {code} ({holds}), which token ids cannot have; tokenize it again")
        expected = HEADER.size + sequences * 12 + boundaries * 8
        if size not in (expected, expected + sequences):
            raise UserError(
                f"{idx} has {size:,} bytes, its {sequences:,} sequences and {boundaries:,} document boundaries need "
                f"{expected:,}; it is cut off or damaged, copy it again"
            )
        return np.dtype(DTYPES[code]).newbyteorder("<"), sequences, boundaries

    @property
    def dtype(self) -> np.dtype:
        return self._header[0]

    def _map(self, dtype: str, offset: int, count: int) -> np.ndarray:
        if count == 0:
            return np.empty(0, dtype)
        return np.asarray(np.memmap(self.prefix + ".idx", dtype, mode="r", offset=offset, shape=(count,)))

    @cached_property
    def _columns(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """lengths [S], pointers [S], document boundaries [D]; checked against the .bin, one window at a time."""
        dtype, sequences, boundaries = self._header
        lengths = self._map("<i4", HEADER.size, sequences)
        pointers = self._map("<i8", HEADER.size + 4 * sequences, sequences)
        documents = self._map("<i8", HEADER.size + 12 * sequences, boundaries)
        end = 0
        for start in range(0, sequences, WINDOW):
            window = lengths[start : start + WINDOW].astype(np.int64)
            ends = end + np.cumsum(window) * dtype.itemsize
            begins = np.concatenate([[end], ends[:-1]])
            wrong = np.flatnonzero((begins != pointers[start : start + WINDOW]) | (window < 0))
            if len(wrong):
                raise UserError(
                    f"{self.prefix}.idx: sequence {start + int(wrong[0])} (counted from 0) does not begin where the "
                    "previous one ends; the index is damaged, or not of one .bin: copy or tokenize it again"
                )
            end = int(ends[-1])
        size = os.path.getsize(self.bin_file)
        if size != end:
            raise UserError(
                f"{self.bin_file} has {size:,} bytes, {self.prefix}.idx describes {end:,}; one of them is another "
                "corpus's, or cut off: copy both again"
            )
        steps_back = any(
            (np.diff(documents[start : start + WINDOW + 1]) < 0).any() for start in range(0, boundaries, WINDOW)
        )
        if boundaries == 0 or documents[0] != 0 or documents[-1] != sequences or steps_back:
            raise UserError(
                f"{self.prefix}.idx: the document boundaries do not run from 0 to its {sequences:,} sequences; the "
                "index is damaged, or was never finalized: tokenize it again"
            )
        return lengths, pointers, documents

    @property
    def num_documents(self) -> int:
        return len(self._columns[2]) - 1

    def list_lengths(self) -> Iterator[np.ndarray]:
        """Yield the tokens of each document, int64, one window of documents at a time."""
        _, pointers, documents = self._columns
        end = os.path.getsize(self.bin_file)
        for start in range(0, self.num_documents, WINDOW):
            firsts = documents[start : start + WINDOW + 1]
            begins = np.full(len(firsts), end, np.int64)
            inside = firsts < len(pointers)
            begins[inside] = pointers[firsts[inside]]
            yield np.diff(begins) // self.dtype.itemsize

    def map_tokens(self) -> np.ndarray:
        """Return all token ids, memory-mapped."""
        if not self._columns[0].any():  # reading the columns checks them against the .bin
            return np.empty(0, self.dtype)
        return np.asarray(np.memmap(self.bin_file, self.dtype, mode="r"))

    def check_tokens(self, vocab_size: int, *, first: int, chunk: np.ndarray) -> None:
        """Raise `UserError` for an id that the tokenizer does not have. first: the position of the chunk."""
        wrong = np.flatnonzero((chunk < 0) | (chunk >= vocab_size)) if len(chunk) else chunk
        if len(wrong):
            place = first + int(wrong[0])
            raise UserError(
                f"{self.bin_file}: token {place:,} (counted from 0) has the id {int(chunk[wrong[0]])}, the tokenizer "
                f"has {vocab_size:,}; give the tokenizer that the corpus was made with"
            )


def describe_files(source: str) -> list:
    """Return `describe_file` of both files: what the tokens depend on."""
    return [describe_file(source.removeprefix(PREFIX) + suffix) for suffix in SUFFIXES]


def describe_file(path: str) -> list:
    """Return path, size, modification time and a hash of the first and the last MiB."""
    status = os.stat(path)
    return [os.path.abspath(path), status.st_size, status.st_mtime_ns, hash_ends(Path(path))]
