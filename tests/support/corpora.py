"""Megatron's tokenized corpora, written from the public definition of the format."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np

CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}
DOCUMENTS = [[[5, 6, 7], [8]], [], [[9, 10, 11, 12, 13]], [[14]]]  # each of some sequences


def write_corpus(
    prefix: Path, documents: list = DOCUMENTS, dtype: str = "uint16", *, code: int = 0, **changed: Any
) -> str:
    sequences = [sequence for document in documents for sequence in document]
    lengths = np.array([len(sequence) for sequence in sequences], "<i4")
    tokens = np.array([token for sequence in sequences for token in sequence], dtype)
    ends = np.cumsum(lengths, dtype="<i8") * tokens.itemsize
    pointers = changed.get("pointers", np.concatenate([[0], ends])[: len(ends)].astype("<i8"))
    boundaries = np.cumsum([0, *(len(document) for document in documents)], dtype="<i8")
    boundaries = changed.get("boundaries", boundaries).astype("<i8")
    head = struct.pack(
        "<9sQBQQ",
        changed.get("magic", b"MMIDIDX\x00\x00"),
        changed.get("version", 1),
        code or CODES[dtype],
        len(lengths),
        len(boundaries),
    )
    index = head + lengths.tobytes() + pointers.tobytes() + boundaries.tobytes()
    prefix.with_suffix(".idx").write_bytes(index[: changed.get("cut", len(index))])
    prefix.with_suffix(".bin").write_bytes(tokens.tobytes() + changed.get("tail", b""))
    return str(prefix)
