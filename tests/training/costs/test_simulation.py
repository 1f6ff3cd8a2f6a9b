"""The simulated step: times that follow by hand."""

from __future__ import annotations

import itertools

import pytest

from training.costs.simulation import list_transfers, simulate
from training.pipeline.schedule import Interleaved, OneForwardOneBackward, Schedule, Unit, UnitKind


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 1), (1, 3), (2, 1), (2, 5), (3, 4), (4, 2), (4, 9)])
def test_even_stages_take_the_bubble_and_no_more(stages: int, micro_batches: int) -> None:
    schedule = OneForwardOneBackward(stages, micro_batches)
    passes = simulate(schedule, [1.0] * stages, [2.0] * stages, [0.0] * (stages - 1))
    total = max(p.stop for p in passes)
    assert total == pytest.approx((micro_batches + stages - 1) * 3)
    assert 1 - micro_batches * 3 / total == pytest.approx(schedule.bubble_share)
    assert len(passes) == 2 * stages * micro_batches


@pytest.mark.parametrize(
    ("stages", "chunks", "micro_batches"), [(2, 2, 4), (2, 3, 2), (3, 2, 6), (4, 2, 8), (4, 4, 4), (8, 2, 16)]
)
def test_even_chunks_take_the_smaller_bubble_and_no_more(stages: int, chunks: int, micro_batches: int) -> None:
    schedule, count = Interleaved(stages, micro_batches, chunks), stages * chunks
    passes = simulate(schedule, [1.0] * count, [2.0] * count, [0.0] * (count - 1))
    total = max(p.stop for p in passes)
    assert total == pytest.approx((chunks * micro_batches + stages - 1) * 3)
    assert 1 - chunks * micro_batches * 3 / total == pytest.approx(schedule.bubble_share)
    assert {(p.chunk, p.micro_batch, p.kind) for p in passes} == set(
        itertools.product(range(count), range(micro_batches), (UnitKind.forward, UnitKind.backward))
    )
    assert all(p.stage_id == p.chunk % stages for p in passes)


def test_a_slow_stage_sets_the_pace() -> None:
    passes = simulate(OneForwardOneBackward(2, 10), [1.0, 3.0], [2.0, 6.0], [0.0])
    assert max(p.stop for p in passes) == pytest.approx(1 + 10 * 9 + 2)


def test_a_transfer_delays_what_waits_for_it() -> None:
    passes = simulate(OneForwardOneBackward(2, 1), [1.0, 1.0], [2.0, 2.0], [0.5])
    assert [(p.stage_id, p.kind, p.start, p.stop) for p in passes] == [
        (0, "forward", 0, 1),
        (1, "forward", 1.5, 2.5),
        (1, "backward", 2.5, 4.5),
        (0, "backward", 5, 7),
    ]


def test_no_stage_does_two_things_at_once() -> None:
    passes = simulate(OneForwardOneBackward(3, 6), [1.0, 1.4, 0.7], [2.2, 1.9, 2.5], [0.1, 0.2])
    for stage_id in range(3):
        own = sorted((p for p in passes if p.stage_id == stage_id), key=lambda p: p.start)
        assert all(earlier.stop <= later.start for earlier, later in itertools.pairwise(own))


class Impossible(Schedule):
    """Every rank begins with the backward pass."""

    def list_units(self, stage_id: int) -> list[Unit]:
        return [Unit(stage_id, 0, UnitKind.backward), Unit(stage_id, 0, UnitKind.forward)]


def test_an_order_that_cannot_be_run_is_no_endless_loop() -> None:
    with pytest.raises(AssertionError, match="wait for each other"):
        simulate(Impossible(2, 1), [1.0, 1.0], [2.0, 2.0], [0.0])


def test_a_transfer_is_shown_where_a_stage_waits_for_it() -> None:
    """Two stages, one micro-batch: the first pass crosses in 0.5, the gradient back in 0.5, and nothing else is on its
    way."""
    passes = simulate(OneForwardOneBackward(2, 1), [1.0, 2.0], [2.0, 4.0], [0.5])
    assert list(list_transfers(passes, [0.5])) == [(1, 1.0, 1.5), (0, 7.5, 8.0)]
    assert list(list_transfers(simulate(OneForwardOneBackward(1, 4), [1.0], [2.0], []), [])) == []


def test_no_transfer_is_shown_over_a_pass() -> None:
    passes = simulate(OneForwardOneBackward(3, 6), [1.0, 1.0, 1.0], [2.0, 2.0, 2.0], [0.25, 5.0])
    for stage, start, stop in list_transfers(passes, [0.25, 5.0]):
        assert start < stop and not [p for p in passes if p.stage_id == stage and p.start < stop and p.stop > start]
