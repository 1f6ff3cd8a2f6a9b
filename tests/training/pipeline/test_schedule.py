"""The schedule: DeepSpeed's own order of passes, and times that follow by hand."""

from __future__ import annotations

import itertools

import pytest
from deepspeed.runtime.pipe.schedule import BackwardPass, ForwardPass, TrainSchedule

from training.pipeline.schedule import bubble_share, list_in_flight, list_transfers, list_units, simulate

SIZES = [(1, 1), (1, 3), (2, 1), (2, 5), (3, 4), (4, 2), (4, 9)]


@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
def test_the_order_is_deepspeeds(stages: int, micro_batches: int) -> None:
    for stage_id in range(stages):
        schedule = TrainSchedule(micro_batches, stages, stage_id)
        commands = [
            command for step in schedule.steps() for command in step if isinstance(command, (ForwardPass, BackwardPass))
        ]
        kinds = [isinstance(command, ForwardPass) for command in commands]
        units = list_units(stage_id, stages, micro_batches)
        assert [unit.is_forward for unit in units] == kinds and {unit.chunk for unit in units} == {stage_id}
        for kind in (True, False):
            assert [unit.micro_batch for unit in units if unit.is_forward is kind] == list(range(micro_batches))


@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
def test_even_stages_take_the_bubble_and_no_more(stages: int, micro_batches: int) -> None:
    passes = simulate([1.0] * stages, [2.0] * stages, [0.0] * (stages - 1), micro_batches)
    total = max(p.stop for p in passes)
    assert total == pytest.approx((micro_batches + stages - 1) * 3)
    assert 1 - micro_batches * 3 / total == pytest.approx(bubble_share(stages, micro_batches))
    assert len(passes) == 2 * stages * micro_batches


@pytest.mark.parametrize(
    ("stages", "chunks", "micro_batches"), [(2, 2, 4), (2, 3, 2), (3, 2, 6), (4, 2, 8), (4, 4, 4), (8, 2, 16)]
)
def test_even_chunks_take_the_smaller_bubble_and_no_more(stages: int, chunks: int, micro_batches: int) -> None:
    count = stages * chunks
    passes = simulate([1.0] * count, [2.0] * count, [0.0] * (count - 1), micro_batches, chunks)
    total = max(p.stop for p in passes)
    assert total == pytest.approx((chunks * micro_batches + stages - 1) * 3)
    assert 1 - chunks * micro_batches * 3 / total == pytest.approx(bubble_share(stages, micro_batches, chunks))
    assert {(p.chunk, p.micro_batch, p.is_forward) for p in passes} == set(
        itertools.product(range(count), range(micro_batches), (True, False))
    )
    assert all(p.stage_id == p.chunk % stages for p in passes)


def test_micro_batches_in_flight() -> None:
    assert list_in_flight(0, 4, 8) == {(1,), (2,), (3,), (4,)}
    # two stages of two chunks: the first stage does forward passes 0 0' 1 1' 2 (of micro-batches 0 and 1, chunk by chunk), then one back
    assert max(map(sum, list_in_flight(0, 2, 4, 2))) == (2 - 0 - 1) * 2 + (2 - 1) * 2 + 1
    assert max(map(sum, list_in_flight(1, 2, 4, 2))) == 3


def test_a_slow_stage_sets_the_pace() -> None:
    passes = simulate([1.0, 3.0], [2.0, 6.0], [0.0], 10)
    assert max(p.stop for p in passes) == pytest.approx(1 + 10 * 9 + 2)


def test_a_transfer_delays_what_waits_for_it() -> None:
    passes = simulate([1.0, 1.0], [2.0, 2.0], [0.5], 1)
    assert [(p.stage_id, p.is_forward, p.start, p.stop) for p in passes] == [
        (0, True, 0, 1), (1, True, 1.5, 2.5), (1, False, 2.5, 4.5), (0, False, 5, 7),
    ]  # fmt: skip


def test_no_stage_does_two_things_at_once() -> None:
    passes = simulate([1.0, 1.4, 0.7], [2.2, 1.9, 2.5], [0.1, 0.2], 6)
    for stage_id in range(3):
        own = sorted((p for p in passes if p.stage_id == stage_id), key=lambda p: p.start)
        assert all(earlier.stop <= later.start for earlier, later in itertools.pairwise(own))


def test_a_transfer_is_shown_where_a_stage_waits_for_it() -> None:
    """Two stages, one micro-batch: the first pass crosses in 0.5, the gradient back in 0.5, and nothing else is on its way."""
    passes = simulate([1.0, 2.0], [2.0, 4.0], [0.5], 1)
    assert list(list_transfers(passes, [0.5])) == [(1, 1.0, 1.5), (0, 7.5, 8.0)]
    assert list(list_transfers(simulate([1.0], [2.0], [], 4), [])) == []


def test_no_transfer_is_shown_over_a_pass() -> None:
    passes = simulate([1.0, 1.0, 1.0], [2.0, 2.0, 2.0], [0.25, 5.0], 6)
    for stage, start, stop in list_transfers(passes, [0.25, 5.0]):
        assert start < stop and not [p for p in passes if p.stage_id == stage and p.start < stop and p.stop > start]
