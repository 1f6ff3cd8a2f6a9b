"""A tokenized folder on disk, memory-mapped: an Arrow folder of `datasets` with a summary and the sizes of its files.

Columns: input_ids and labels (lists of int32), length and num_targets (int32; targets are counted after the shift),
source (int32; the entry of `train_file` that the sample comes from).
"""

import json
from pathlib import Path

import datasets
import numpy as np
import pyarrow
from datasets import Features, List, Value

from data.summary import Summary

SUMMARY_FILE = "summary.json"
SIZES_FILE = "file_sizes.json"
TOKENIZED_FEATURES = Features(
    {
        "input_ids": List(Value("int32")),
        "labels": List(Value("int32")),
        "length": Value("int32"),
        "num_targets": Value("int32"),
        "source": Value("int32"),
    }
)


def load_summary(path: str | Path) -> Summary:
    return Summary.from_json((Path(path) / SUMMARY_FILE).read_text())


def find_damage(path: Path) -> str | None:
    """What keeps a tokenized folder from being read; None when it is whole. Sizes are compared, contents are not read."""
    try:
        sizes = json.loads((path / SIZES_FILE).read_text())
        load_summary(path)
        for name, size in sizes.items():
            found = (path / name).stat().st_size
            if found != size:
                return f"{name} has {found:,} bytes, {size:,} were written"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


class TokenizedDataset:
    """A tokenized folder, memory-mapped: a rank touches only the columns it reads, lengths and target counts aside."""

    def __init__(self, path: str | Path, reads_inputs: bool, reads_labels: bool) -> None:
        self._arguments = (path, reads_inputs, reads_labels)
        table = datasets.load_from_disk(str(path)).data
        self.lengths: np.ndarray = table.column("length").to_numpy()  # [num_samples]
        self.num_targets: np.ndarray = table.column("num_targets").to_numpy()  # [num_samples]
        self.sources: np.ndarray = table.column("source").to_numpy()  # [num_samples]
        held = [name for name, reads in (("input_ids", reads_inputs), ("labels", reads_labels)) if reads]
        self._columns = {name: _ListColumn(table.column(name)) for name in held}

    def __reduce__(self) -> tuple:
        # A worker process that is spawned opens the folder itself: pickling the views would copy the data.
        return type(self), self._arguments

    def __len__(self) -> int:
        return len(self.lengths)

    def input_ids(self, index: int) -> np.ndarray:
        return self._read("input_ids", index)

    def labels(self, index: int) -> np.ndarray:
        return self._read("labels", index)

    def _read(self, name: str, index: int) -> np.ndarray:
        if name not in self._columns:
            raise RuntimeError(f"this rank does not hold {name}: the dataset was opened without that column")
        return self._columns[name][index]


class _ListColumn:
    """Zero-copy rows of an Arrow column of lists; indexing through `datasets` costs a hundred times as much."""

    def __init__(self, column: pyarrow.ChunkedArray) -> None:
        chunks = [chunk for chunk in column.chunks if len(chunk)]
        self._offsets = [chunk.offsets.to_numpy() for chunk in chunks]
        self._values = [chunk.values.to_numpy() for chunk in chunks]
        self._starts = np.cumsum([0] + [len(chunk) for chunk in chunks])

    def __getitem__(self, index: int) -> np.ndarray:
        if not 0 <= index < self._starts[-1]:
            raise IndexError(f"sample {index} of {self._starts[-1]}")
        chunk = int(np.searchsorted(self._starts, index, side="right")) - 1
        begin, end = self._offsets[chunk][index - self._starts[chunk] :][:2]
        return self._values[chunk][begin:end]
