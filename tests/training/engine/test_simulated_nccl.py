"""No rank waits forever on GPUs: under blocking launches, waits for the whole device at any time, and neither."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

import pytest
from support.nccl_player import list_rounds, play, split_into_batches
from support.rank_programs import EXPERTS, LAYERS, PASSES, REPLICAS, SAME_EXPERTS, Kernel, Program, Wait, record

from training.pipeline.exchanges import (
    Exchange,
    Exchanges,
    Message,
    find_input,
    find_sender,
    is_local,
    plan_exchanges,
)
from training.pipeline.schedule import Interleaved, OneForwardOneBackward, Schedule
from training.pipeline.zero_bubble import PassTimes, ZeroBubble

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
                uneven = tuple(PassTimes(1 + chunk % 2, 2.5, 1.5) for chunk in range(2 * stages))
                yield ZeroBubble(stages, micro_batches, memory_limit=1, pass_times=uneven)


SCHEDULES = list(list_schedules())


@pytest.mark.parametrize("way", WAYS)
def test_every_schedule_ends(way: str) -> None:
    for seed, schedule in enumerate(SCHEDULES):
        assert not any(play(record(schedule), **WAYS[way], seed=seed)), schedule


@pytest.mark.parametrize("way", WAYS)
def test_every_evaluation_ends(way: str) -> None:
    for seed, schedule in enumerate(list_schedules(4)):
        for num_evaluated in (1, schedule.num_stages + 1):
            assert not any(play(record(schedule, num_evaluated), **WAYS[way], seed=seed)), schedule


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
        assert find_reductions_between_exchanges(programs[0])
        assert not any(play(programs, **WAYS[way], seed=seed)), schedule


def find_reductions_between_exchanges(program: Program) -> list[int]:
    """The places of the reductions that are launched before the last exchange of a step's last backward pass."""
    streams = [call.stream if isinstance(call, Kernel) else None for call in program]
    last = max(place for place, stream in enumerate(streams) if stream == EXPERTS)
    return [place for place in range(last) if streams[place] in (REPLICAS, SAME_EXPERTS)]


def test_a_bucket_that_is_late_on_one_rank_locks() -> None:
    """All ranks launch reductions and exchanges in one order: here one launches a reduction after the next exchange."""
    programs = record(OneForwardOneBackward(2, 2), num_replicas=4, expert_parallel_size=2)
    assert not any(play(programs, blocking=True))
    late = programs[0]
    place = find_reductions_between_exchanges(late)[-1]
    reduction = late.pop(place)
    after = next(
        place for place in range(place, len(late)) if isinstance(late[place], Kernel) and late[place].stream == EXPERTS
    )
    late.insert(after + 1, reduction)
    assert all(play(programs, blocking=True)[rank] for rank in (0, 2))  # it, and the rank that it divides experts with


@pytest.mark.parametrize("way", WAYS)
def test_evaluations_with_divided_experts_end(way: str) -> None:
    for seed, schedule in enumerate(list_schedules(3)):
        programs = record(schedule, num_evaluated=schedule.num_stages + 1, num_replicas=2, expert_parallel_size=2)
        assert any(isinstance(call, Kernel) and call.stream == EXPERTS for call in programs[0])
        assert not any(play(programs, **WAYS[way], seed=seed)), schedule


def test_messages_between_two_ranks_are_received_in_the_order_of_sending() -> None:
    for schedule in SCHEDULES:
        for forward_only in (False, True):
            sent, received = {}, {}
            for stage, exchanges in enumerate(plan_exchanges(schedule, forward_only)):
                exchanges = list(chain.from_iterable(exchanges))
                for message in (exchange.sent for exchange in exchanges if exchange.sent):
                    sent.setdefault((stage, schedule.find_stage(message.chunk)), []).append(message)
                for message in (message for exchange in exchanges for message in exchange.received):
                    received.setdefault((find_sender(schedule, message), stage), []).append(message)
            assert sent == received and sent


def test_the_model_locks_where_it_should() -> None:
    """Two ranks that send and then receive; two that do so in one group do not lock, nor where nothing waits."""
    apart = [[Kernel("p", sends=[1]), Kernel("p", receives=[1])], [Kernel("p", sends=[0]), Kernel("p", receives=[0])]]
    assert all(play(apart))
    together = [[Kernel("p", sends=[1 - rank], receives=[1 - rank])] for rank in (0, 1)]
    assert not any(play(together, blocking=True))
    connecting = [
        [Kernel("back", receives=[1]), Kernel("forth", sends=[1])],
        [Kernel("back", sends=[0]), Kernel("forth", receives=[0])],
    ]
    early = [
        [Kernel("back", receives=[1]), Kernel(PASSES), Kernel("forth", sends=[1])],
        [one := Kernel("forth", receives=[0]), Wait(one), Kernel(PASSES), Kernel("back", sends=[0])],
    ]
    early = [first + program for first, program in zip(connecting, early)]
    assert not any(play(early))
    assert all(play(early, blocking=True))  # a receive posted before the pass that its message needs
    assert all(play(early, barriers=1.0))


def test_a_direction_that_is_first_used_within_a_step_locks() -> None:
    """A rank that sends an activation and receives the first gradient in one group launches it once the other sends a
    gradient, which that cannot while it waits for the activation."""
    step = [
        [Kernel("p", sends=[1], receives=[1])],
        [Kernel("p", receives=[0]), Kernel(PASSES), Kernel("p", sends=[0])],
    ]
    assert not any(play(step))
    assert all(play(step, blocking=True))
    assert all(play(step, barriers=1.0))
    connected = [[Kernel("p", sends=[1 - rank], receives=[1 - rank]), *step[rank]] for rank in (0, 1)]
    assert not any(play(connected, blocking=True))
    assert not any(play(connected, barriers=1.0))


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


def test_a_second_message_to_a_rank_waits_for_the_first_one_from_it() -> None:
    """Hidden states and positions are not sent whole before what the group receives has come."""
    receiving = [Kernel("p", receives=[0, 0]), Kernel(PASSES), Kernel("p", sends=[0])]
    assert all(play([[Kernel("p", sends=[1, 1], receives=[1])], receiving]))
    whole = [Kernel("p", receives=[0]), Kernel(PASSES), Kernel("p", sends=[0])]
    assert not any(play([[Kernel("p", sends=[1], receives=[1])], whole]))


@pytest.mark.parametrize("num_stages", [8, 12, 16])
def test_pipelines_over_several_nodes_end(num_stages: int) -> None:
    """More than eight ranks are more rounds than NCCL puts into a batch."""
    for schedule in (
        OneForwardOneBackward(num_stages, 2 * num_stages),
        Interleaved(num_stages, 2 * num_stages, 2),
        ZeroBubble(num_stages, 2 * num_stages),
    ):
        programs = record(schedule)
        for gpus_per_node in (number for number in (1, 2, 3, 4, 8) if num_stages % number == 0):
            assert not any(play(programs, barriers=0.1, gpus_per_node=gpus_per_node)), (schedule, gpus_per_node)


def test_two_ranks_have_the_same_messages_in_a_group() -> None:
    """Then NCCL may go through a group in any order that is the same on all ranks."""
    for schedule in SCHEDULES:
        for forward_only in (False, True):
            groups = [list(chain.from_iterable(stays)) for stays in plan_exchanges(schedule, forward_only)]
            for rank, own in enumerate(groups):
                for other in range(rank):
                    assert list_between(schedule, own, rank, other) == list_between(
                        schedule, groups[other], other, rank
                    )


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
    assert all(play(record(Interleaved(12, 24, 2)), gpus_per_node=4))  # there by the rounds


def test_rounds_are_those_of_nccl() -> None:
    """The distances that its `init.cc` gives as an example, of 16 ranks."""
    assert [local for _, local in list_rounds(16, 16)] == [0, 1, 3, 6, 10, 15, 5, 12, 4, 13, 7, 2, 14, 11, 9, 8]
    assert list(list_rounds(6, 2)) == [(node, local) for node in (0, 1, 2) for local in (0, 1)]
    own = Kernel("p", sends=[1, 1], receives=[1])
    assert split_into_batches(own, 0, range(2), 2) == {(True, 1, 0): 0, (False, 1, 0): 0, (True, 1, 1): 1}
    edge = Kernel("p", sends=[8], receives=[6, 8])  # the last rank of a node of eight
    assert split_into_batches(edge, 7, range(16), 8) == {(False, 6, 0): 0, (True, 8, 0): 1, (False, 8, 0): 1}
