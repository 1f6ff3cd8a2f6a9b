"""Schedules of all kinds, for what holds whatever their sizes and the times of their passes are."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from hypothesis import strategies as st

from training.pipeline.exchanges import Exchanges, plan_exchanges
from training.pipeline.schedule import Interleaved, OneForwardOneBackward, PassTimes, Schedule, Unit
from training.pipeline.zero_bubble import ZeroBubble

# Nanoseconds that the passes of one kind are drawn from: alike, none (as backward passes of an evaluation or of frozen
# chunks, or what can be put off), some of them none, or up to a million times apart
SCALES = ((1,), (0,), (0, 1), (1, 2, 3), (0, 1_000_000), tuple(10**power for power in range(7)))

KINDS: tuple[type[Schedule], ...] = (OneForwardOneBackward, Interleaved, ZeroBubble)


def schedules(most_stages: int = 4, kinds: Sequence[type[Schedule]] = KINDS) -> st.SearchStrategy[Schedule]:
    """Return the schedules of two stages or more, of any sizes and times, for tests by hypothesis."""
    return st.builds(
        _draw_schedule, st.randoms(use_true_random=False), st.integers(2, most_stages), st.sampled_from(kinds)
    )


def draw_schedules(count: int, most_stages: int = 4) -> list[Schedule]:
    """Return some of them, always the same ones."""
    random = Random(0)
    return [_draw_schedule(random, random.randint(2, most_stages), random.choice(KINDS)) for _ in range(count)]


def _draw_schedule(random: Random, stages: int, kind: type[Schedule]) -> Schedule:
    micro_batches, chunks = random.randint(1, 2 * stages + 1), 1
    if kind is Interleaved:
        micro_batches, chunks = stages * random.randint(1, 2), random.randint(2, 3)
    if kind is not ZeroBubble:
        return kind(stages, micro_batches, chunks, draw_times(random, stages * chunks))
    limit = random.choice((None, 1, 2, 3))
    return ZeroBubble(
        stages, max(stages, micro_batches), pass_times=draw_times(random, 2 * stages), max_in_flight=limit
    )


def draw_times(random: Random, num_chunks: int) -> tuple[PassTimes, ...]:
    """Return the times of the passes of each chunk."""
    scales = [random.choice(SCALES) for _ in PassTimes._fields]
    return tuple(PassTimes(*map(random.choice, scales)) for _ in range(num_chunks))


def list_orders(schedule: Schedule) -> list[tuple[list[Unit], list[Unit], list[tuple[Exchanges, ...]]]]:
    """Return the passes of a step and of an evaluation on each rank, and what it exchanges in both."""
    plans = [plan_exchanges(schedule, forward_only) for forward_only in (False, True)]
    return [
        (schedule.list_units(stage), schedule.list_forward(stage), [plan[stage] for plan in plans])
        for stage in range(schedule.num_stages)
    ]
