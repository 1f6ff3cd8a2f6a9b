"""The order of the zero-bubble schedule: what the papers count, what a rank holds, what it refuses."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.configs import build_config
from support.planned import resolve_described
from support.schedules import schedules
from transformers import LlamaConfig

from errors import UserError
from training.costs.simulation import simulate
from training.pipeline import zero_bubble
from training.pipeline.partition import balance_chunks
from training.pipeline.schedule import EVEN, PassTimes, Unit, UnitKind
from training.pipeline.zero_bubble import ZeroBubble, default_max_in_flight
from training.resolution.resolve import resolve_layout
from training.resolution.target import Target

SIZES = [(2, 4), (2, 8), (4, 8), (4, 16), (8, 16), (8, 32)]
LONG = [pytest.param(16, M, marks=pytest.mark.full) for M in (32, 64)]
EVEN_TIMES = [ZeroBubble(*sizes) for sizes in (*SIZES[:4], (1, 3), (3, 5), (4, 4))]


@given(st.sampled_from(EVEN_TIMES) | schedules(kinds=[ZeroBubble]))
def test_every_pass_is_run_once_and_after_what_it_needs(schedule: ZeroBubble) -> None:
    num_stages, micro_batches = schedule.num_stages, schedule.num_micro_batches
    kinds = (UnitKind.forward, UnitKind.input_backward, UnitKind.weight_backward)
    for stage in range(num_stages):
        units, chunks = schedule.list_units(stage), (stage, 2 * num_stages - 1 - stage)
        assert schedule.list_chunks(stage) == chunks
        assert set(units) == {Unit(*unit) for unit in itertools.product(chunks, range(micro_batches), kinds)}
        place = {unit: number for number, unit in enumerate(units)}
        assert all(
            place[unit] < place[unit._replace(kind=later)]
            for unit in units
            for earlier, later in itertools.pairwise(kinds)
            if unit.kind is earlier
        )
        # a link carries the micro-batches of one chunk, in their order
        for chunk, kind in itertools.product(chunks, kinds):
            assert [unit.micro_batch for unit in units if (unit.chunk, unit.kind) == (chunk, kind)] == [
                *range(micro_batches)
            ]


@pytest.mark.parametrize("times", [(1.0, 1.0, 1.0), (1.0, 1.1, 0.9), (1.0, 1.3, 0.8), (1.0, 1.6, 0.9)])
@pytest.mark.parametrize(("num_stages", "micro_batches"), [*SIZES, *LONG])
def test_the_bubble_is_at_most_a_third_of_1f1bs(
    num_stages: int, micro_batches: int, times: tuple[float, float, float]
) -> None:
    """In seconds, of a step whose passes take these times a stage (two chunks)."""
    halves = [[seconds / 2] * 2 * num_stages for seconds in times]
    schedule = ZeroBubble(num_stages, micro_batches, pass_times=tuple(PassTimes(*each) for each in zip(*halves)))
    forward, inputs, weights = halves
    passes = simulate(
        schedule, forward, [i + w for i, w in zip(inputs, weights)], [0.0] * (2 * num_stages - 1), weights
    )
    end = max(p.stop for p in passes)
    bubble = end - micro_batches * sum(times)
    assert bubble <= (num_stages - 1) * sum(times) / 3
    assert schedule.bubble_share == pytest.approx(bubble / end)


@pytest.mark.parametrize(("num_stages", "micro_batches"), SIZES)
def test_with_even_passes_only_filling_the_pipeline_is_lost(num_stages: int, micro_batches: int) -> None:
    """The last rank waits for P - 1 chunks; no schedule in two chunks a rank can do better."""
    schedule = ZeroBubble(num_stages, micro_batches)
    assert schedule.bubble_share == pytest.approx((num_stages - 1) / (6 * micro_batches + num_stages - 1))


@pytest.mark.parametrize("limit", [1, 2, 3, None])
@pytest.mark.parametrize(("num_stages", "micro_batches"), [(2, 8), (4, 8)])
def test_no_rank_holds_more_than_the_limit(num_stages: int, micro_batches: int, limit: int | None) -> None:
    schedule = ZeroBubble(num_stages, micro_batches, max_in_flight=limit)
    most = limit or default_max_in_flight(num_stages)
    for stage in range(num_stages):
        held = [sum(each.held) + sum(each.deferred) for each in schedule.list_in_flight(stage)]
        assert max(held) <= 2 * most
    assert max(held) == 2 * most or limit is None  # it uses what it may


def test_more_memory_is_no_slower() -> None:
    times = (PassTimes(1.0, 1.3, 0.8),) * 8
    seconds = [1 - ZeroBubble(4, 16, max_in_flight=limit, pass_times=times).bubble_share for limit in (1, 2, 3, 4, 5)]
    assert seconds == sorted(seconds) and seconds[0] < 0.6 < 0.9 < seconds[-1]


def test_no_rules_are_tried_after_an_order_without_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    """In which the last rank waits for its first input, and for nothing else."""
    tried, arrange = list[object](), zero_bubble._arrange

    def count(rules: zero_bubble._Rules, most: float) -> zero_bubble.Order | None:
        tried.append(rules)
        return arrange(rules, most)

    monkeypatch.setattr(zero_bubble, "_arrange", count)
    even, uneven = (PassTimes(11, 11, 11),) * 8, (PassTimes(11, 14, 9),) * 7 + (PassTimes(15, 20, 11),)
    assert zero_bubble.find_order(4, 16, even, 5).seconds == 3 * 11 + 16 * 2 * 33 and len(tried) == 1
    zero_bubble.find_order(4, 6, uneven, 5)
    assert len(tried) == 1 + 30


@pytest.mark.parametrize(
    ("sizes", "num_layers", "message"),
    [
        ((4, 3), 20, "needs at least num_stages=4 micro-batches .* gradient_accumulation_steps=3; give at least 4"),
        ((4, 8), 7, r"two chunks a stage, num_stages=4 x 2 = 8, and it has 7 layers; lower num_stages"),
    ],
)
def test_what_it_cannot_run(sizes: tuple[int, int], num_layers: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        ZeroBubble(*sizes).check(num_layers)


ARCHITECTURE = LlamaConfig(
    hidden_size=64, intermediate_size=128, num_attention_heads=4, num_hidden_layers=7, vocab_size=4096
)


def time_chunks(*overrides: str) -> tuple[list[int], tuple[PassTimes, ...]]:
    config = build_config(
        "num_stages=2", "micro_batch_size=2", "schedule=zero_bubble", "gradient_accumulation_steps=4", *overrides
    )
    run = resolve_layout(resolve_described(config, ARCHITECTURE, 2), config, Target(2, has_accelerator=False))
    return run.bounds, run.layout.pass_times


def test_the_order_knows_the_head_and_what_cannot_wait() -> None:
    plain = "activation_checkpoint_interval=0"
    bounds, times = time_chunks(plain)
    assert len(bounds) == 5 and len(times) == 4
    # the rank with the head has fewer layers
    assert bounds[1] + (bounds[4] - bounds[3]) - 3 < bounds[3] - bounds[1]
    head = times[3].forward / times[3].weight_backward
    assert head > times[1].forward / times[1].weight_backward
    assert time_chunks("activation_checkpoint_interval=1")[1][1].input_backward > times[1].input_backward
    dpo = time_chunks(plain, "data=preference")[1]
    assert dpo[3].forward / dpo[3].input_backward < times[3].forward / times[3].input_backward


def test_what_waits_under_lora_is_next_to_nothing() -> None:
    for each in time_chunks("activation_checkpoint_interval=0", "adapter=lora")[1]:
        assert each.weight_backward <= 0.1 * each.input_backward


def test_even_chunks_are_what_a_schedule_takes_without_times() -> None:
    assert ZeroBubble(2, 4).list_units(0) == ZeroBubble(2, 4, pass_times=(EVEN,) * 4).list_units(0)


@pytest.mark.parametrize("micro_batches", [4, 8])
def test_of_two_ranks_the_first_begins_with_a_small_chunk(micro_batches: int) -> None:
    """The second waits for nothing else, so an even cut loses more."""

    def lose(layers_of_chunks: list[int]) -> float:
        times = tuple(PassTimes(1.1 * count, 1.25 * count, count) for count in layers_of_chunks)
        return ZeroBubble(2, micro_batches, pass_times=times).bubble_share

    bounds = balance_chunks([1] * 16, ZeroBubble(2, micro_batches))
    assert bounds == [0, 2, 6, 10, 16]
    assert lose([stop - start for start, stop in itertools.pairwise(bounds)]) < 0.6 * lose([4] * 4)
