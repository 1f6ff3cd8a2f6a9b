"""The rows of micro-batches: a sample, or several that are packed, or documents end to end.

The samples of each row are an index next to the tokens, `KEY/rows-.../`, written once by the first process that needs
it and memory-mapped afterwards; the tokens themselves are written once, however they are packed. `Rows` reads it: rows
are what the order shuffles and what `micro_batch_size` counts.

P pieces (what one row holds of one sample), R rows, T tokens of a row.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from console import pluralize
from data.options import Packing
from data.sample import IGNORE_INDEX, Attachment
from data.sources.mixture import Mixture
from data.storage.cache import lock_folder
from data.storage.hashes import find_changed, write_hashes
from data.storage.packing import Pieces, concatenate, lay_singly, pack_best_fit
from data.storage.tokenized import TokenizedDataset, column_file, map_column
from errors import UserError
from filesystem import discard_folder, make_temporary, publish_folder

PIECE_COLUMNS = ("sample_id", "start", "stop")  # int64 [P]
ROW_COLUMNS = ("length", "num_targets")  # int64 [R]
COLUMNS = (*PIECE_COLUMNS, *ROW_COLUMNS, "offset")  # offset: int64 [R + 1], the first piece of each row
# Samples that are laid into rows at a time: memory does not grow with the data, and few rows end up partly filled.
WINDOW = 2**18
INDEX_VERSION = 2  # raise it when the same plan gives other rows; a resume then refuses checkpoints of before


@dataclass(frozen=True)
class RowPlan:
    """The layout of samples in rows of at most `max_seq_length` tokens.

    group_size: samples that stay together: 2 for the pairs of preferences. They are adjacent rows, which the order
    shuffles together and `micro_batch_size` counts as one; or they share a packed row.
    companion: the folder in the tokenized one whose samples are laid into the same rows by their numbers (`copy_rows`),
    so packed rows have room for the longer one of each; empty for none.
    """

    max_seq_length: int
    packing: Packing = Packing.NONE
    mixture: Mixture | None = None
    group_size: int = 1
    companion: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        if self.max_seq_length < 2:
            raise UserError(
                f"max_seq_length={self.max_seq_length}: at least 2, since a token is predicted from the previous one"
            )
        if self.packing is Packing.BEST_FIT and self.max_seq_length < self.group_size:
            raise UserError(
                f"max_seq_length={self.max_seq_length}: the {self.group_size} samples of a record share a packed row, "
                "and have a token each at least; raise it, or give data.packing=false"
            )

    @property
    def is_trivial(self) -> bool:
        """Returns whether row r is sample r, so that nothing is written."""
        return self.packing is Packing.NONE and self.mixture is None

    @property
    def rows_per_group(self) -> int:
        """The rows that the order shuffles together, and that `micro_batch_size` counts as one."""
        return self.packing.count_rows(self.group_size)

    def folder(self, path: str | Path) -> Path:
        """Return the folder of this plan's index in the tokenized folder `path`."""
        name = hashlib.sha256(f"{INDEX_VERSION} {self!r}{self.companion}".encode()).hexdigest()[:16]
        return Path(path) / f"rows-{name}"


def prepare_rows(
    path: Path,
    plan: RowPlan,
    key: str,
    log: Callable[[str], None] | None = print,
    *,
    names: Sequence[str] = (),
    compares_bytes: bool = True,
) -> None:
    """Write the index of a tokenized folder's rows unless it is there.

    key: what the log calls the files. log: None on a rank that does not log. names: those of the mixture's sources.
    compares_bytes: as of `prepare_dataset`.
    """
    folder = plan.folder(path)
    if not plan.is_trivial and not _is_whole(folder, compares_bytes):
        with lock_folder(path, log or (lambda text: None)):
            if not _is_whole(folder, compares_bytes):
                dataset = TokenizedDataset(path, False, True)
                _write_index(folder, build_pieces(path, plan), dataset)
    if log is not None:
        _describe_rows(path, plan, key, log, names=names)


def copy_rows(path: Path, other: Path, plan: RowPlan, compares_bytes: bool = True) -> None:
    """Write the rows of the folder `path` for `other`, whose samples correspond to its own; they are whole in both."""
    folder = plan.folder(other)
    if plan.is_trivial or _is_whole(folder, compares_bytes):
        return
    with lock_folder(other, lambda text: None):
        if not _is_whole(folder, compares_bytes):
            dataset, rows = TokenizedDataset(other, False, True), Rows(path, plan, False, False)
            singly = lay_singly(rows.sample_ids, dataset.lengths)
            _write_index(folder, iter([replace(singly, offsets=rows.offsets)]), dataset)


def _describe_rows(path: Path, plan: RowPlan, key: str, log: Callable[[str], None], *, names: Sequence[str]) -> None:
    rows = Rows(path, plan, False, False)
    num_groups = rows.num_pieces // plan.group_size
    if plan.group_size > 1:
        log(f"{key}: {pluralize(num_groups, 'record')}, of each {plan.group_size} samples that stay together")
    if plan.mixture is not None:
        dataset, size = TokenizedDataset(path, False, False), plan.group_size
        described = plan.mixture.describe(
            names, dataset.sources[::size], _sum_groups(dataset.lengths, size), rows.sample_ids[::size] // size
        )
        log(f"{key}: {described}")
    if plan.packing is not Packing.NONE:
        records = f", {num_groups / len(rows):.1f} records in each" if plan.group_size > 1 else ""
        log(
            f"{key}: packed into {pluralize(len(rows), 'row')} of {plan.max_seq_length:,} tokens, "
            f"{compute_fill(rows, plan):.1%} full{records}"
        )


def compute_fill(rows: "Rows", plan: RowPlan) -> float:
    """Return the share of `max_seq_length` x rows that holds tokens: the packing efficiency."""
    return int(rows.lengths.sum(dtype=np.int64)) / (len(rows) * plan.max_seq_length)


def count_rows(path: str | Path, plan: RowPlan) -> int:
    """Return the number of rows, or of groups of them: what the order shuffles."""
    return len(Rows(path, plan, False, False)) // plan.rows_per_group


def list_rows(groups: np.ndarray | range, group_size: int) -> np.ndarray:
    """Return the rows, or the samples, of groups, in their order."""
    return (np.asarray(groups, np.int64)[:, None] * group_size + np.arange(group_size)).reshape(-1)


def _sum_groups(counts: np.ndarray, group_size: int) -> np.ndarray:
    return counts.reshape(-1, group_size).sum(axis=1, dtype=np.int64)


def build_pieces(path: Path, plan: RowPlan) -> Iterator[Pieces]:
    """Yield the rows of each window of samples of the tokenized folder `path`."""
    dataset, rooms = TokenizedDataset(path, False, False), None
    if plan.companion:
        rooms = np.maximum(dataset.lengths, TokenizedDataset(path / plan.companion, False, False).lengths)
    chosen, size = None, plan.group_size
    if plan.mixture is not None:
        chosen = list_rows(
            plan.mixture.choose_samples(dataset.sources[::size], _sum_groups(dataset.lengths, size)), size
        )
    yield from lay_windows(dataset.lengths, plan, chosen, rooms)


def lay_windows(
    lengths: np.ndarray, plan: RowPlan, chosen: np.ndarray | None = None, rooms: np.ndarray | None = None
) -> Iterator[Pieces]:
    """Yield the rows of each window of samples. chosen: the samples to lay, int64 [P]; None for all, each once.
    lengths, rooms: as in `lay_samples`."""
    count, window = len(lengths if chosen is None else chosen), plan.group_size * max(1, WINDOW // plan.group_size)
    for start in range(0, count, window):
        stop = min(start + window, count)
        sample_ids = np.arange(start, stop) if chosen is None else chosen[start:stop]
        yield lay_samples(sample_ids, lengths, plan, rooms)


def lay_samples(sample_ids: np.ndarray, lengths: np.ndarray, plan: RowPlan, rooms: np.ndarray | None = None) -> Pieces:
    """Lay the samples `sample_ids` [P] into rows. lengths: of all samples, [N]. rooms: as in `pack_best_fit`."""
    if plan.packing is Packing.BEST_FIT:
        return pack_best_fit(sample_ids, lengths, plan.max_seq_length, plan.group_size, rooms)
    if plan.packing is Packing.CONCATENATE:
        return concatenate(sample_ids, lengths, plan.max_seq_length)
    return lay_singly(sample_ids, lengths)


def _count_targets(pieces: Pieces, dataset: TokenizedDataset) -> np.ndarray:
    """Return the targets of each row, int64 [R]; the first token of a piece is not a target."""
    counts = dataset.num_targets[pieces.sample_ids].astype(np.int64)
    lengths = pieces.stops - pieces.starts
    for piece in np.flatnonzero(lengths < dataset.lengths[pieces.sample_ids]):
        labels = dataset.labels(pieces.sample_ids[piece], pieces.starts[piece] + 1, pieces.stops[piece])
        counts[piece] = np.count_nonzero(labels != IGNORE_INDEX)
    return np.add.reduceat(counts, pieces.offsets[:-1])


def _write_index(folder: Path, windows: Iterable[Pieces], dataset: TokenizedDataset) -> None:
    """Write the index; the folder appears whole, by a rename."""
    discard_folder(folder)
    temporary = make_temporary(folder)
    with ExitStack() as stack:
        files = {name: stack.enter_context(open(column_file(temporary, name), "wb")) for name in COLUMNS}
        num_pieces = 0
        files["offset"].write(np.zeros(1, np.int64).data)
        for pieces in windows:
            written = {
                "sample_id": pieces.sample_ids,
                "start": pieces.starts,
                "stop": pieces.stops,
                "length": pieces.compute_row_lengths(),
                "num_targets": _count_targets(pieces, dataset),
                "offset": num_pieces + pieces.offsets[1:],
            }
            for name, values in written.items():
                files[name].write(values.astype(np.int64, copy=False).data)
            num_pieces += len(pieces.sample_ids)
    write_hashes(temporary)
    publish_folder(temporary, folder)


def _is_whole(folder: Path, compares_bytes: bool) -> bool:
    try:
        changed, columns = find_changed(folder, compares_bytes), _map_index(folder)
    except (OSError, ValueError, TypeError, AttributeError):  # what a damaged file of hashes leads to
        return False
    if changed is not None:
        return False
    num_pieces, num_rows = ({len(columns[name]) for name in names} for names in (PIECE_COLUMNS, ROW_COLUMNS))
    return num_pieces == {int(columns["offset"][-1])} and num_rows == {len(columns["offset"]) - 1}


def _map_index(folder: Path) -> dict[str, np.ndarray]:
    return {name: map_column(folder, name, np.dtype(np.int64)) for name in COLUMNS}


class GroupLengths:
    """Returns the tokens of the longest row of each group, which the order sorts by; see `GlobalOrder.lengths`."""

    def __init__(self, path: Path, plan: RowPlan) -> None:
        self._rows, self._size = Rows(path, plan, False, False), plan.rows_per_group

    def __call__(self, groups: np.ndarray) -> np.ndarray:
        return self._rows.lengths[list_rows(groups, self._size)].reshape(-1, self._size).max(axis=1)


class Rows:
    """The rows of a tokenized folder. A rank reads only its own columns, and lengths and target counts.

    Positions restart and the first label is -100 at each piece, which separates documents.
    """

    def __init__(self, path: str | Path, plan: RowPlan, reads_inputs: bool, reads_labels: bool) -> None:
        self._arguments = (path, plan, reads_inputs, reads_labels)
        self._dataset = dataset = TokenizedDataset(path, reads_inputs, reads_labels)
        self._sample_labels = dataset.sample_labels if reads_labels else None
        self._index: dict[str, np.ndarray] | None = None
        self.lengths: np.ndarray = dataset.lengths  # [R]
        self.num_targets: np.ndarray = dataset.num_targets  # [R]
        if not plan.is_trivial:
            self._index = index = _map_index(plan.folder(path))
            self.lengths, self.num_targets = index["length"], index["num_targets"]

    def __reduce__(self) -> tuple:
        # A worker process that is spawned opens the folder itself: pickling the views would copy the data.
        return type(self), self._arguments

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def sample_ids(self) -> np.ndarray:
        """The samples of all rows, each as often as it occurs; one that is cut counts where it begins."""
        if self._index is None:
            return np.arange(len(self))
        return self._index["sample_id"][self._index["start"] == 0]

    @property
    def num_pieces(self) -> int:
        """The number of pieces of all rows."""
        return len(self) if self._index is None else len(self._index["sample_id"])

    @property
    def offsets(self) -> np.ndarray:
        """The first piece of each row, int64 [R + 1]."""
        return np.arange(len(self) + 1) if self._index is None else self._index["offset"]

    def pieces(self, row: int) -> list[tuple[int, int, int]]:
        """Return (sample id, start, stop) of each piece of the row."""
        if self._index is None:
            return [(int(row), 0, int(self.lengths[row]))]
        run = slice(*self._index["offset"][row : row + 2])
        return list(zip(*(self._index[name][run].tolist() for name in PIECE_COLUMNS)))

    def count_cut(self, row: int) -> list[int]:
        """Return how many tokens were truncated at the end of each piece of the row."""
        cut, lengths = self._dataset.num_cut, self._dataset.lengths
        return [
            0 if cut is None or stop < lengths[sample] else int(cut[sample]) for sample, _, stop in self.pieces(row)
        ]

    def piece_counts(self, rows: np.ndarray) -> np.ndarray:
        """Return the number of pieces of each row, int64 [len(rows)]."""
        if self._index is None:
            return np.ones(len(rows), np.int64)
        offsets = self._index["offset"]
        return offsets[rows + 1] - offsets[rows]

    def count_pieces(self, rows: np.ndarray) -> int:
        """Return the number of pieces of the rows together."""
        return int(self.piece_counts(rows).sum())

    def longest_piece(self, rows: np.ndarray, seq_length: int) -> int:
        """Return the tokens of the longest piece of the rows, with the last one of each padded to `seq_length`."""
        if self._index is None:
            return seq_length
        counts, offsets = self.piece_counts(rows), self._index["offset"]
        ends = counts.cumsum()
        places = np.arange(ends[-1]) + np.repeat(offsets[rows] - (ends - counts), counts)
        lengths = self._index["stop"][places] - self._index["start"][places]
        lengths[ends - 1] += seq_length - self.lengths[rows]
        return int(lengths.max())

    @cached_property
    def _first_targets(self) -> np.ndarray:
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.num_targets, dtype=np.int64)])

    def first_targets(self, rows: np.ndarray) -> np.ndarray:
        """Return the number of the first target of each row, where all are numbered row by row."""
        return self._first_targets[rows]

    def input_ids(self, row: int) -> np.ndarray:
        """Return the tokens of the row, int32 [T]."""
        return np.concatenate([self._dataset.input_ids(i, start, stop) for i, start, stop in self.pieces(row)])

    def position_ids(self, row: int) -> np.ndarray:
        """Return positions, int64 [T], from 0 at each piece."""
        return np.concatenate([np.arange(stop - start) for _, start, stop in self.pieces(row)])

    def segment_ids(self, row: int) -> np.ndarray:
        """Return the piece of each token, int32 [T], counted from 1."""
        lengths = [stop - start for _, start, stop in self.pieces(row)]
        return np.repeat(np.arange(1, len(lengths) + 1, dtype=np.int32), lengths)

    def list_samples(self, rows: np.ndarray) -> np.ndarray:
        """Return the sample of each piece of the rows, int64 [pieces], also of no rows."""
        return np.array([sample for row in rows for sample, _, _ in self.pieces(int(row))], np.int64)

    def attachments(self, row: int) -> list[Attachment]:
        """Return the attachments of the samples of the row, whose tokens are counted from its first; each piece is a
        whole sample."""
        found, first = [], 0
        for sample, start, stop in self.pieces(row):
            found += [
                Attachment(first + each.start, first + each.stop, each.content)
                for each in self._dataset.attachments(sample)
            ]
            first += stop - start
        return found

    def sample_labels(self, rows: np.ndarray) -> np.ndarray:
        """Return the labels of the samples of the rows, [pieces, K], also of no rows; K is 0 for data without."""
        samples = self.list_samples(rows)
        return np.zeros((len(samples), 0)) if self._sample_labels is None else self._sample_labels[samples]

    def count_targets(self, rows: np.ndarray) -> np.ndarray:
        """Return the targets of each piece of the rows, int64 [pieces]; each piece is a whole sample."""
        return self._dataset.num_targets[self.list_samples(rows)].astype(np.int64)

    def labels(self, row: int) -> np.ndarray:
        """Return labels, int32 [T], -100 on the first token of each piece."""
        pieces = [self._dataset.labels(i, start, stop).copy() for i, start, stop in self.pieces(row)]
        for piece in pieces:
            piece[0] = IGNORE_INDEX
        return np.concatenate(pieces)
