"""Which samples share a row of `max_seq_length` tokens: pure functions of the samples' lengths.

`pack_best_fit` is best-fit decreasing, the packing of 2107.02027: the longest sample first, each into the fullest row
that still has room for it. Whole samples only, and samples that stay together share a row. `concatenate` lays documents
end to end and cuts them where a row is full.

N samples, P pieces (a piece is what one row holds of one sample), R rows, T max_seq_length.
"""

from dataclasses import dataclass

import numpy as np

from data.sample import OVERLAP


@dataclass(frozen=True)
class Pieces:
    """Rows as runs of pieces: row r holds the pieces `offsets[r]` up to `offsets[r + 1]`, in that order."""

    sample_ids: np.ndarray  # int64 [P]
    starts: np.ndarray  # int64 [P], the first token of the sample that the row holds
    stops: np.ndarray  # int64 [P], one past the last
    offsets: np.ndarray  # int64 [R + 1]

    @property
    def num_rows(self) -> int:
        return len(self.offsets) - 1

    def compute_row_lengths(self) -> np.ndarray:
        """Return the tokens in each row, int64 [R]."""
        return np.add.reduceat(self.stops - self.starts, self.offsets[:-1])


def lay_singly(sample_ids: np.ndarray, lengths: np.ndarray) -> Pieces:
    """Lay one sample into each row. sample_ids: [P], each any number of times. lengths: of all samples, [N]."""
    stops = lengths[sample_ids].astype(np.int64)
    return Pieces(sample_ids.astype(np.int64), np.zeros_like(stops), stops, np.arange(len(sample_ids) + 1))


def pack_best_fit(
    sample_ids: np.ndarray,
    lengths: np.ndarray,
    max_seq_length: int,
    group_size: int = 1,
    rooms: np.ndarray | None = None,
) -> Pieces:
    """Pack each of `sample_ids` [P] whole into some row.

    lengths: of all samples, [N]. group_size: consecutive ones of `sample_ids` that share a row, in their order. rooms:
    the tokens of a row that each sample takes, [N], those of a group at most `max_seq_length` together; by default its
    length.

    Time: O(P log P) for sorting, and one step for each pair of a length and a remaining room that meet.
    """
    groups = sample_ids.reshape(-1, group_size)
    sizes = (lengths if rooms is None else rooms)[groups].sum(axis=1, dtype=np.int64)
    order = np.argsort(-sizes, kind="stable")  # longest first
    row_of, num_rows = _assign_rows(sizes[order], max_seq_length)
    by_row = np.argsort(row_of, kind="stable")
    singly = lay_singly(groups[order[by_row]].reshape(-1), lengths)
    offsets = group_size * np.searchsorted(row_of[by_row], np.arange(num_rows + 1))
    return Pieces(singly.sample_ids, singly.starts, singly.stops, offsets)


def _assign_rows(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, int]:
    """Return the row of each group of samples, and the number of rows. lengths: of the groups, decreasing.

    Groups of one length are placed together. The fullest row that fits one of them, with room for k, gets k: after the
    first it is fuller than any other that fits. So all rows with equal room are filled at once.
    """
    row_of = np.empty(len(lengths), dtype=np.int64)
    rows_with_room = _RowsByRoom()
    num_rows = placed = 0
    for length, count in zip(*(part[::-1].tolist() for part in np.unique(lengths, return_counts=True))):
        end = placed + count
        while placed < end:
            room = rows_with_room.find(length)
            if room is None:
                room, rows = capacity, np.arange(num_rows, num_rows - (placed - end) // (capacity // length))
                num_rows += len(rows)
            else:
                rows = rows_with_room.take(room, -((placed - end) // (room // length)))
            filled = np.repeat(rows, room // length)[: end - placed]
            row_of[placed : placed + len(filled)] = filled
            placed += len(filled)
            in_last = len(filled) - (len(rows) - 1) * (room // length)
            rows_with_room.put(room % length, rows[:-1])
            rows_with_room.put(room - in_last * length, rows[-1:])
    return row_of, num_rows


class _RowsByRoom:
    """Rows by their remaining room in tokens; bit r of one integer is set where there are rows with room r."""

    def __init__(self) -> None:
        self._rows: dict[int, list[np.ndarray]] = {}
        self._rooms = 0

    def find(self, length: int) -> int | None:
        """Return the smallest room that holds `length` tokens; None without one."""
        fitting = self._rooms >> length
        return length + (fitting & -fitting).bit_length() - 1 if fitting else None

    def take(self, room: int, count: int) -> np.ndarray:
        """Remove and return up to `count` of the rows with that room, [<= count]."""
        chunk = self._rows[room].pop()
        if not self._rows[room]:
            self._rooms ^= 1 << room
        self.put(room, chunk[count:])
        return chunk[:count]

    def put(self, room: int, rows: np.ndarray) -> None:
        if len(rows) and room:
            self._rows.setdefault(room, []).append(rows)
            self._rooms |= 1 << room


def concatenate(sample_ids: np.ndarray, lengths: np.ndarray, max_seq_length: int) -> Pieces:
    """Lay the documents `sample_ids` [P'] end to end, and cut them where a row is full.

    A document that continues in the next row starts there with the last token of the previous row, so that each token
    but a document's first is predicted exactly once. The last slot of a row stays empty where it would hold one token
    of a new piece, without a target.
    """
    ids: list[int] = []
    starts: list[int] = []
    stops: list[int] = []
    offsets = [0]
    room = max_seq_length
    for sample_id, length in zip(sample_ids.tolist(), lengths[sample_ids].tolist()):
        start = 0
        while True:
            if room <= OVERLAP < length - start:
                offsets.append(len(ids))
                room = max_seq_length
            stop = min(length, start + room)
            ids.append(sample_id)
            starts.append(start)
            stops.append(stop)
            room -= stop - start
            if room == 0:
                offsets.append(len(ids))
                room = max_seq_length
            if stop == length:
                break
            start = stop - OVERLAP
    if offsets[-1] != len(ids):
        offsets.append(len(ids))
    return Pieces(*(np.array(column, dtype=np.int64) for column in (ids, starts, stops, offsets)))
