"""No rank waits forever on GPUs: under blocking launches, waits for the whole device at any time, and neither."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from graphlib import TopologicalSorter
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.nccl_player import play
from support.rank_programs import EXPERTS, LAYERS, PASSES, REPLICAS, SAME_EXPERTS, Kernel, Program, Wait, record
from support.schedules import draw_schedules, schedules

from training.pipeline.exchanges import (
    Exchange,
    Exchanges,
    Message,
    find_input,
    find_output,
    find_sender,
    is_local,
    plan_exchanges,
)
from training.pipeline.schedule import Interleaved, OneForwardOneBackward, Schedule
from training.pipeline.zero_bubble import ZeroBubble

WAYS = {"free": {}, "blocking": {"blocking": True}, "barriers": {"barriers": 0.3}, "rare": {"barriers": 0.03}}


def list_schedules(most_stages: int = 8) -> Iterator[Schedule]:
    for stages in (2, 3, 4, 8):
        if stages > most_stages:
            return
        for micro_batches in sorted({1, 2, stages, stages + 1, 3 * stages}):
            yield OneForwardOneBackward(stages, micro_batches)
            if micro_batches % stages == 0:
                yield Interleaved(stages, micro_batches, 2)
                yield Interleaved(stages, micro_batches, 3)
            if micro_batches >= stages:
                yield ZeroBubble(stages, micro_batches)
                yield ZeroBubble(stages, micro_batches, max_in_flight=1)


TIMED = draw_schedules(20)  # with random times
SCHEDULES = [*list_schedules(), *TIMED]
record_once = cache(record)  # for tests that change nothing of what is recorded


@pytest.mark.parametrize("way", WAYS)
def test_every_schedule_ends(way: str) -> None:
    for seed, schedule in enumerate(SCHEDULES):
        assert not any(play(record_once(schedule), **WAYS[way], seed=seed)), schedule


@pytest.mark.parametrize("way", WAYS)
def test_every_evaluation_ends(way: str) -> None:
    for seed, schedule in enumerate([*list_schedules(4), *TIMED]):
        for num_evaluated in (1, schedule.num_stages + 1):
            assert not any(play(record_once(schedule, num_evaluated), **WAYS[way], seed=seed)), schedule


@pytest.mark.parametrize("meets_in_passes", [False, True])
@pytest.mark.parametrize("zero_stage", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_replicas_end(way: str, zero_stage: int, meets_in_passes: bool) -> None:
    for seed, schedule in enumerate(list_schedules(3)):
        programs = record(schedule, num_replicas=2, zero_stage=zero_stage, meets_in_passes=meets_in_passes)
        reduced = sum(isinstance(call, Kernel) and call.stream == "replicas" for call in programs[0])
        passes = schedule.num_micro_batches if zero_stage == 2 else 1
        assert reduced == LAYERS * len(schedule.list_chunks(0)) * passes
        assert not any(play(programs, **WAYS[way], seed=seed)), schedule


@pytest.mark.parametrize("zero_stage", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_replicas_that_divide_experts_end(way: str, zero_stage: int) -> None:
    """Each pass meets the ranks of its expert group; gradients are reduced over two kinds of groups. That the host also
    waits for its passes there, for the numbers of rows, changes nothing: what it launches later comes after them."""
    for seed, schedule in enumerate(list_schedules(2)):
        programs = record(schedule, num_replicas=4, zero_stage=zero_stage, expert_parallel_size=2)
        streams = [call.stream for call in programs[0] if isinstance(call, Kernel)]
        assert streams.count(SAME_EXPERTS) == streams.count(REPLICAS) > 0 < streams.count(EXPERTS)
        assert not any(play(programs, **WAYS[way], seed=seed)), schedule


@pytest.mark.parametrize("zero_stage", [1, 2])
def test_an_expert_without_a_token_on_one_rank_changes_no_order(zero_stage: int) -> None:
    """All ranks launch reductions and the exchanges of passes in one order. Buckets that leave within a pass would wait
    for its end on the rank that lacks a gradient, and there alone."""
    for schedule in (OneForwardOneBackward(2, 2), ZeroBubble(2, 4)):
        options = {"num_replicas": 4, "expert_parallel_size": 2, "zero_stage": zero_stage, "without_experts": [0]}
        for seed, way in enumerate(WAYS.values()):
            assert not any(play(record(schedule, **options), **way, seed=seed))
        in_passes = play(record(schedule, **options, reduces_in_passes=True), blocking=True)
        assert in_passes[0] and in_passes[2]  # it, and the rank that it divides experts with
        del options["without_experts"]
        assert not any(play(record(schedule, **options, reduces_in_passes=True), blocking=True))


@pytest.mark.parametrize("way", WAYS)
def test_evaluations_with_divided_experts_end(way: str) -> None:
    for seed, schedule in enumerate(list_schedules(3)):
        programs = record(schedule, num_evaluated=schedule.num_stages + 1, num_replicas=2, expert_parallel_size=2)
        assert any(isinstance(call, Kernel) and call.stream == EXPERTS for call in programs[0])
        assert not any(play(programs, **WAYS[way], seed=seed)), schedule


@given(schedules(most_stages=6), st.booleans())
def test_messages_between_two_ranks_are_received_in_the_order_of_sending(
    schedule: Schedule, forward_only: bool
) -> None:
    sent, received = {}, {}
    for stage, exchanges in enumerate(plan_exchanges(schedule, forward_only)):
        exchanges = list(chain.from_iterable(exchanges))
        for message in (exchange.sent for exchange in exchanges if exchange.sent):
            sent.setdefault((stage, schedule.find_stage(message.chunk)), []).append(message)
        for message in (message for exchange in exchanges for message in exchange.received):
            received.setdefault((find_sender(schedule, message), stage), []).append(message)
    assert sent == received and sent


@given(schedules(most_stages=6), st.booleans())
def test_each_pass_has_its_input_and_its_result_is_sent_at_once(schedule: Schedule, forward_only: bool) -> None:
    for stage, (first, *after) in enumerate(plan_exchanges(schedule, forward_only)):
        units = schedule.list_forward(stage) if forward_only else schedule.list_units(stage)
        held = {message for exchange in first for message in exchange.received}
        for unit, stay in zip(units, after, strict=True):
            needed, output = find_input(schedule, unit), find_output(schedule, unit)
            assert needed is None or is_local(schedule, needed) or needed in held, (stage, unit)
            is_sent = output is not None and not is_local(schedule, output)
            assert [exchange.sent for exchange in stay if exchange.sent] == ([output] if is_sent else [])
            held.update(message for exchange in stay for message in exchange.received)


def test_the_model_locks_where_it_should() -> None:
    """Two ranks that send and then receive; two that do so in one group do not lock, nor where nothing waits."""
    apart = [[Kernel("p", sends=[1]), Kernel("p", receives=[1])], [Kernel("p", sends=[0]), Kernel("p", receives=[0])]]
    assert all(play(apart))
    together = [[Kernel("p", sends=[1 - rank], receives=[1 - rank])] for rank in (0, 1)]
    assert not any(play(together, blocking=True))
    early = [
        [Kernel("back", receives=[1]), Kernel(PASSES), Kernel("forth", sends=[1])],
        [one := Kernel("forth", receives=[0]), Wait(one), Kernel(PASSES), Kernel("back", sends=[0])],
    ]
    assert not any(play(early))
    assert all(play(early, blocking=True))  # a receive posted before the pass that its message needs
    assert all(play(early, barriers=1.0))
    # Groups that do not match, as on a GPU: the first waits for all that it receives before it has sent everything
    unequal = [
        [Kernel("p", sends=[1, 1], receives=[1])],
        [Kernel("p", receives=[0, 0]), Kernel(PASSES), Kernel("p", sends=[0])],
    ]
    assert all(play(unequal))


def list_groups(program: Program) -> list[Kernel]:
    """Return the groups of messages of a rank in the order of their launches."""
    return [call for call in program if isinstance(call, Kernel) and (call.sends or call.receives)]


def test_connections_are_open_before_the_first_step() -> None:
    """Else the first message in one direction waits until the other rank launches it too."""
    for schedule in SCHEDULES:
        for rank, program in enumerate(record_once(schedule)):
            first, *later = list_groups(program)
            assert program[0] is first
            for direction in ("sends", "receives"):
                peers = {peer for group in later for peer in getattr(group, direction)}
                assert peers <= set(getattr(first, direction)), (schedule, rank)
            assert sorted(first.sends) == sorted(first.receives)


def test_two_ranks_launch_the_same_groups() -> None:
    """At most one send and one receive between two ranks in a group, and both ranks have it: then it does not matter in
    which order NCCL goes through one."""
    for schedule, num_evaluated in ((each, number) for each in SCHEDULES for number in (0, each.num_stages + 1)):
        groups = [list_groups(program) for program in record_once(schedule, num_evaluated)]
        for rank, own in enumerate(groups):
            for other in range(rank):
                there = count_between(groups[other], rank)
                assert count_between(own, other) == [each[::-1] for each in there], (schedule, rank, other)
                assert all(max(each) == 1 for each in there), (schedule, rank, other)


def count_between(groups: Sequence[Kernel], other: int) -> list[tuple[int, int]]:
    """Return the numbers of sends to a rank and of receives from it in each group that has some."""
    counts = [(group.sends.count(other), group.receives.count(other)) for group in groups]
    return [each for each in counts if any(each)]


def test_all_ranks_go_through_one_order_of_moments() -> None:
    """A moment is what a group and those that it meets have in common. Where all ranks launch in the order of moments,
    each may wait after every launch."""
    for schedule in SCHEDULES:
        moments: dict[tuple[int, int], tuple[int, int]] = {}  # (rank, number of a group) -> the first of its moment
        groups = [list_groups(program) for program in record_once(schedule)]

        def find(group: tuple[int, int], moments: dict[tuple[int, int], tuple[int, int]] = moments) -> tuple[int, int]:
            while group in moments:
                group = moments[group]
            return group

        for rank, own in enumerate(groups):
            for other in range(rank):
                pairs = zip(find_with(own, other), find_with(groups[other], rank), strict=True)
                for number, number_there in pairs:
                    one, two = find((rank, number)), find((other, number_there))
                    if one != two:
                        moments[one] = two
        order = TopologicalSorter[tuple[int, int]]()
        for rank, own in enumerate(groups):
            for number in range(1, len(own)):
                order.add(find((rank, number)), find((rank, number - 1)))
        order.prepare()  # raises CycleError


def find_with(groups: Sequence[Kernel], other: int) -> list[int]:
    """Return the numbers of the groups that have a message from or to a rank."""
    return [number for number, group in enumerate(groups) if other in (*group.sends, *group.receives)]


def test_a_plan_that_receives_as_late_as_it_can_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan is there for this: here each message is received just before the pass that needs it."""
    from training.engine import runner

    def plan_late(schedule: Schedule, forward_only: bool = False) -> list[list[Exchanges]]:
        late = []
        for stage, exchanges in enumerate(plan_exchanges(schedule, forward_only)):
            units = schedule.list_forward(stage) if forward_only else schedule.list_units(stage)
            needed = [find_input(schedule, unit) for unit in units]
            own = [(one,) if one is not None and not is_local(schedule, one) else () for one in needed]
            sent = [next((exchange.sent for exchange in stay if exchange.sent), None) for stay in exchanges]
            together = (Exchange(message, each) for message, each in zip(sent, [*own, ()], strict=True))
            late.append([(exchange,) if any(exchange) else () for exchange in together])
        return late

    monkeypatch.setattr(runner, "plan_exchanges", plan_late)
    locked = [schedule for schedule in SCHEDULES if any(play(record(schedule), blocking=True))]
    assert {type(schedule) for schedule in locked} >= {ZeroBubble, Interleaved}
    assert not any(play(record(replace(SCHEDULES[0], num_micro_batches=4)), blocking=True))


@pytest.mark.parametrize("num_stages", [12, 16])
def test_long_pipelines_end(num_stages: int) -> None:
    for schedule in (
        OneForwardOneBackward(num_stages, 2 * num_stages),
        Interleaved(num_stages, 2 * num_stages, 2),
        ZeroBubble(num_stages, 2 * num_stages),
    ):
        assert not any(play(record(schedule), barriers=0.1)), schedule


@given(schedules(most_stages=6), st.booleans())
def test_two_ranks_plan_the_same_messages_at_a_moment(schedule: Schedule, forward_only: bool) -> None:
    groups = [list(chain.from_iterable(stays)) for stays in plan_exchanges(schedule, forward_only)]
    for rank, own in enumerate(groups):
        for other in range(rank):
            assert list_between(schedule, own, rank, other) == list_between(schedule, groups[other], other, rank)


def list_between(schedule: Schedule, groups: Sequence[Exchange], rank: int, other: int) -> list[set[Message]]:
    """The messages between two ranks in each group that has some."""
    between = []
    for group in groups:
        sent = {group.sent} if group.sent and schedule.find_stage(group.sent.chunk) == other else set()
        between.append(sent | {each for each in group.received if find_sender(schedule, each) == other})
    return [messages for messages in between if messages]


def test_a_group_that_holds_more_than_one_moment_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen on a GPU: each rank launched one group a stay, and 1F1B stood still in its first step, while what two ranks
    exchange under the other schedules is symmetric."""
    from training.engine import runner

    def plan_stays(schedule: Schedule, forward_only: bool = False) -> list[list[Exchanges]]:
        merged = []
        for stays in plan_exchanges(schedule, forward_only):
            sent = [next((exchange.sent for exchange in stay if exchange.sent), None) for stay in stays]
            received = [tuple(chain.from_iterable(exchange.received for exchange in stay)) for stay in stays]
            merged.append([(Exchange(*each),) if any(each) else () for each in zip(sent, received, strict=True)])
        return merged

    monkeypatch.setattr(runner, "plan_exchanges", plan_stays)
    assert all(play(record(OneForwardOneBackward(2, 8))))
    assert not any(play(record(ZeroBubble(2, 8)))) and not any(play(record(Interleaved(2, 8, 2))))
