"""Rows from lengths: best fit against a slow textbook version, and documents end to end without a lost token."""

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from data.storage.packing import Pieces, concatenate, lay_singly, pack_best_fit

LENGTHS = st.lists(st.integers(1, 16), min_size=1, max_size=60)
MANY = list(range(1, 17)) * 20


def pack_slowly(lengths: np.ndarray, capacity: int) -> list[int]:
    """Textbook best-fit decreasing; returns the remaining rooms, sorted."""
    rooms: list[int] = []
    for length in sorted(lengths.tolist(), reverse=True):
        fitting = [room for room in rooms if room >= length]
        if fitting:
            rooms.remove(min(fitting))
        rooms.append((min(fitting) if fitting else capacity) - length)
    return sorted(rooms)


def rows_of(pieces: Pieces) -> list[list[tuple[int, int, int]]]:
    columns = zip(pieces.sample_ids.tolist(), pieces.starts.tolist(), pieces.stops.tolist())
    every = list(columns)
    return [every[start:stop] for start, stop in zip(pieces.offsets, pieces.offsets[1:])]


@given(LENGTHS)
@example(MANY)
def test_best_fit_is_the_textbook_one(drawn: list[int]) -> None:
    lengths = np.array(drawn)
    pieces = pack_best_fit(np.arange(len(lengths)), lengths, 16)
    assert sorted(16 - pieces.compute_row_lengths()) == pack_slowly(lengths, 16)
    assert sorted(pieces.sample_ids) == list(range(len(lengths)))
    assert all(start == 0 and stop == lengths[i] for row in rows_of(pieces) for i, start, stop in row)


def test_a_sample_that_comes_twice_is_packed_twice() -> None:
    pieces = pack_best_fit(np.array([1, 0, 1]), np.array([9, 5, 4]), 10)
    assert sorted(tuple(sorted(i for i, _, _ in row)) for row in rows_of(pieces)) == [(0,), (1, 1)]


@given(LENGTHS, st.integers(1, 3))
@example(MANY, 2)
def test_groups_stay_together_in_a_row(drawn: list[int], size: int) -> None:
    """They are packed as samples of their whole length, or of the room that they are given."""
    lengths = np.array(drawn * size)
    capacity, larger = 17 * size, lengths + 1
    for taken, rooms in ((lengths, None), (larger, larger)):
        pieces = pack_best_fit(np.arange(len(lengths)), lengths, capacity, size, rooms)
        rows = rows_of(pieces)
        for row in rows:
            ids = [sample for sample, _, _ in row]
            assert ids == [first + place for first in ids[::size] for place in range(size)]
            assert not any(first % size for first in ids[::size]) and sum(taken[ids]) <= capacity
        assert sorted(pieces.sample_ids) == list(range(len(lengths)))
        assert all(start == 0 and stop == lengths[i] for row in rows for i, start, stop in row)
        assert len(rows) == len(pack_slowly(taken.reshape(-1, size).sum(axis=1), capacity))


def test_a_million_samples_take_seconds_and_fill_the_rows() -> None:
    lengths = np.minimum(2048, 1 + np.random.default_rng(1).lognormal(5.3, 0.8, 10**6).astype(np.int32))
    pieces = pack_best_fit(np.arange(len(lengths)), lengths, 2048)
    assert pieces.compute_row_lengths().max() <= 2048
    assert lengths.sum() / (2048 * pieces.num_rows) > 0.999
    assert np.array_equal(np.sort(pieces.sample_ids), np.arange(len(lengths)))


@given(LENGTHS, st.integers(2, 20) | st.just(1000))
@example(MANY, 7)
def test_documents_end_to_end_lose_no_token(drawn: list[int], capacity: int) -> None:
    lengths = np.array(drawn) + 1
    rows = rows_of(concatenate(np.arange(len(lengths)), lengths, capacity))
    pieces = [piece for row in rows for piece in row]
    assert [i for i, start, _ in pieces if start == 0] == list(range(len(lengths)))
    predicted = [(i, token) for i, start, stop in pieces for token in range(start + 1, stop)]
    assert predicted == [(i, token) for i, length in enumerate(lengths) for token in range(1, length)]
    filled = [sum(stop - start for _, start, stop in row) for row in rows]
    assert max(filled) <= capacity and set(filled[:-1]) <= {capacity, capacity - 1}


def test_one_sample_a_row() -> None:
    pieces = lay_singly(np.array([2, 0, 0]), np.array([4, 5, 6]))
    assert rows_of(pieces) == [[(2, 0, 6)], [(0, 0, 4)], [(0, 0, 4)]]
