"""The order of samples is a function of (seed, epoch, step) alone."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from data.order import GlobalOrder, micro_batch_ids, permute
from errors import UserError

ORDER = GlobalOrder(num_samples=50, global_batch_size=8, seed=3)


def test_an_epoch_takes_each_sample_at_most_once_and_drops_the_remainder() -> None:
    assert ORDER.steps_per_epoch == 6
    for epoch in range(3):
        ids = np.concatenate([ORDER.sample_ids(epoch * 6 + step) for step in range(6)])
        assert len(ids) == len(set(ids.tolist())) == 48
        assert ids.min() >= 0 and ids.max() < 50
    whole = GlobalOrder(num_samples=48, global_batch_size=8, seed=3)
    assert sorted(np.concatenate([whole.sample_ids(step) for step in range(6)])) == list(range(48))


def test_epochs_and_seeds_differ_and_calls_do_not() -> None:
    first = ORDER.sample_ids(0).copy()
    assert first.tolist() != list(range(8))
    assert first.tolist() != ORDER.sample_ids(6).tolist()
    assert first.tolist() != GlobalOrder(50, 8, seed=4).sample_ids(0).tolist()
    assert first.tolist() == ORDER.sample_ids(0).tolist() == GlobalOrder(50, 8, seed=3).sample_ids(0).tolist()


def test_a_batch_does_not_depend_on_the_steps_before_it() -> None:
    in_turn = [ORDER.sample_ids(step).tolist() for step in range(20)]
    assert [ORDER.sample_ids(step).tolist() for step in reversed(range(20))] == in_turn[::-1]


def test_samples_of_like_lengths_share_a_batch() -> None:
    """An epoch takes the samples that it takes without lengths; steps of short and long ones alternate."""
    lengths = np.random.default_rng(0).lognormal(5, 1, 1003).astype(int)
    plain, alike = (GlobalOrder(1003, 8, seed=3, lengths=given) for given in (None, lambda ids: lengths[ids]))
    per_epoch = plain.steps_per_epoch
    for epoch in range(2):
        steps = range(epoch * per_epoch, (epoch + 1) * per_epoch)
        found, expected = (np.concatenate([each.sample_ids(step) for step in steps]) for each in (alike, plain))
        assert sorted(found) == sorted(expected) and found.tolist() != expected.tolist()
        widths = [[np.ptp(lengths[each.sample_ids(step)]) for step in steps] for each in (alike, plain)]
        assert np.mean(widths[0]) < np.mean(widths[1]) / 8
        means = [lengths[alike.sample_ids(step)].mean() for step in steps]
        assert abs(np.corrcoef(means[:-1], means[1:])[0, 1]) < 0.3
    in_turn = [alike.sample_ids(step).tolist() for step in range(20)]
    assert [alike.sample_ids(step).tolist() for step in reversed(range(20))] == in_turn[::-1]
    assert in_turn[0] != GlobalOrder(1003, 8, seed=4, lengths=alike.lengths).sample_ids(0).tolist()


def test_a_permutation_cannot_be_changed_by_its_reader() -> None:
    with pytest.raises(ValueError, match="read-only"):
        ORDER.sample_ids(0)[0] = 1


@given(st.integers(1, 2000), st.integers(0, 2**63), st.integers(0, 1000))
@example(99_991, 3, 0)
def test_a_permutation_takes_each_place_once(size: int, seed: int, epoch: int) -> None:
    assert np.array_equal(np.sort(permute(np.arange(size), size, seed, epoch)), np.arange(size))


def test_permutations_are_as_good_as_random() -> None:
    """Over many epochs each sample comes to each place equally often (chi-square per degree of freedom, 1 +- 5
    deviations), and so does each order.
    """
    size, epochs = 20, 1000
    counts = np.zeros((size, size))
    for epoch in range(epochs):
        counts[np.arange(size), permute(np.arange(size), size, 0, epoch)] += 1
    degrees = (size - 1) ** 2
    chi_square = ((counts - epochs / size) ** 2 / (epochs / size)).sum() / degrees
    assert abs(chi_square - 1) < 5 * np.sqrt(2 / degrees)
    orders = Counter(tuple(permute(np.arange(4), 4, 1, epoch)) for epoch in range(960))
    assert len(orders) == 24 and min(orders.values()) > 15 and max(orders.values()) < 75


def test_neighbours_do_not_stay_together() -> None:
    places = permute(np.arange(10**6), 10**6, 0, 0)
    assert (
        abs(np.corrcoef(places[:-1], places[1:])[0, 1]) < 0.005
        and abs(np.corrcoef(places, np.arange(10**6))[0, 1]) < 0.005
    )


@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 5), st.integers(0, 20))
def test_every_layout_reads_the_same_global_batch(
    dp_size: int, micro_batch_size: int, accumulation: int, step: int
) -> None:
    ids = GlobalOrder(130, dp_size * micro_batch_size * accumulation, seed=3).sample_ids(step)
    read = [
        micro_batch_ids(ids, micro_batch, dp_rank=rank, dp_size=dp_size, micro_batch_size=micro_batch_size)
        for micro_batch in range(accumulation)
        for rank in range(dp_size)
    ]
    assert np.concatenate(read).tolist() == ids.tolist()
    assert {len(part) for part in read} == {micro_batch_size}


def test_fewer_samples_than_one_global_batch() -> None:
    with pytest.raises(UserError, match="train_file holds fewer samples .7. than .*global_batch_size=8.*; lower"):
        GlobalOrder(num_samples=7, global_batch_size=8, seed=0)


def test_a_negative_seed() -> None:
    with pytest.raises(UserError, match="seed=-1 is negative; give 0 or more"):
        GlobalOrder(num_samples=8, global_batch_size=8, seed=-1)
