"""The schedules: DeepSpeed's own order of passes, micro-batches in flight, and what a schedule refuses."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from dataclasses import replace
from itertools import accumulate, permutations
from pathlib import Path
from random import Random

import pytest
from deepspeed.runtime.pipe.schedule import BackwardPass, ForwardPass, TrainSchedule
from hypothesis import example, given
from support.configs import build_config
from support.schedules import draw_times, list_orders, schedules

from errors import UserError
from training.distributed.topology import Layout, build_layout
from training.pipeline.schedule import InFlight, Interleaved, OneForwardOneBackward, Schedule, UnitKind
from training.pipeline.schedules import SCHEDULES, build_schedule, find_schedule, schedule_layout
from training.pipeline.zero_bubble import ZeroBubble

SIZES = [(1, 1), (1, 3), (2, 1), (2, 5), (3, 4), (4, 2), (4, 9)]
NUM_LAYERS = 8
ROOT = Path(__file__).resolve().parents[3]
ORDERS = """
import pickle, sys
from support.schedules import list_orders
pickle.dump([list_orders(each) for each in pickle.load(sys.stdin.buffer)], sys.stdout.buffer)
"""


@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
def test_the_order_is_deepspeeds(stages: int, micro_batches: int) -> None:
    for stage_id in range(stages):
        schedule = TrainSchedule(micro_batches, stages, stage_id)
        commands = [
            command for step in schedule.steps() for command in step if isinstance(command, (ForwardPass, BackwardPass))
        ]
        kinds = [UnitKind.forward if isinstance(command, ForwardPass) else UnitKind.backward for command in commands]
        units = OneForwardOneBackward(stages, micro_batches).list_units(stage_id)
        assert [unit.kind for unit in units] == kinds and {unit.chunk for unit in units} == {stage_id}
        for kind in (UnitKind.forward, UnitKind.backward):
            assert [unit.micro_batch for unit in units if unit.kind is kind] == list(range(micro_batches))


def test_micro_batches_in_flight() -> None:
    assert OneForwardOneBackward(4, 8).list_in_flight(0) == {((4,), (0,))}
    # Two stages of two chunks: the first stage runs forward passes 0 1 0' 1' 2 (micro-batches, chunk by chunk), then
    # one backward.
    interleaved = Interleaved(2, 4, 2)
    assert max(sum(held) for held, _ in interleaved.list_in_flight(0)) == (2 - 0 - 1) * 2 + (2 - 1) * 2 + 1
    assert max(sum(held) for held, _ in interleaved.list_in_flight(1)) == 3


def count_most(schedule: Schedule, stage: int) -> int:
    """Return the most chunks of micro-batches that a rank may hold, whatever the times of its passes are."""
    if isinstance(schedule, ZeroBubble):
        return 2 * schedule.limit
    ahead = schedule.num_stages - 1 - stage
    if isinstance(schedule, Interleaved):
        ahead = 2 * ahead + (schedule.num_chunks - 1) * schedule.num_stages
    return min(ahead + 1, schedule.num_chunks * schedule.num_micro_batches)


@given(schedules(most_stages=6))
def test_a_rank_holds_no_more_whatever_its_passes_take(schedule: Schedule) -> None:
    """Until the last half of a backward pass."""
    changes = dict.fromkeys(UnitKind, -1) | {UnitKind.forward: 1, UnitKind.input_backward: 0}
    for stage in range(schedule.num_stages):
        held = [*accumulate(changes[unit.kind] for unit in schedule.list_units(stage))]
        assert max(held) <= count_most(schedule, stage) and held[-1] == 0, stage
        assert schedule.splits_backward or max(held) == count_most(schedule, stage)
        assert max(sum(map(sum, state)) for state in schedule.list_in_flight(stage)) == max(held)


@given(schedules())
@example(OneForwardOneBackward(4, 8))
@example(Interleaved(4, 8, 2))
@example(ZeroBubble(4, 8))
def test_largest_states_in_flight_cover_every_pass(schedule: Schedule) -> None:
    """A state that is not listed takes no more than a listed one, whatever a chunk takes; none is listed in vain."""

    def is_within(state: InFlight, other: InFlight) -> bool:
        return all(mine <= theirs for each, its in zip(state, other, strict=True) for mine, theirs in zip(each, its))

    for stage in range(schedule.num_stages):
        chunks = schedule.list_chunks(stage)
        held, deferred = dict.fromkeys(chunks, 0), dict.fromkeys(chunks, 0)
        at_backward = schedule.list_backward(stage)
        for chunk, _, kind in schedule.list_units(stage):
            state = InFlight(tuple(held.values()), tuple(deferred.values()))
            if kind in (UnitKind.backward, UnitKind.input_backward):
                number = chunks.index(chunk)
                assert any(is_within(state, other) for other, begins in at_backward if begins == number)
            held[chunk] += {UnitKind.forward: 1, UnitKind.weight_backward: 0}.get(kind, -1)
            deferred[chunk] += {UnitKind.input_backward: 1, UnitKind.weight_backward: -1}.get(kind, 0)
            state = InFlight(tuple(held.values()), tuple(deferred.values()))
            assert any(is_within(state, other) for other in schedule.list_in_flight(stage))
        for listed in (
            schedule.list_in_flight(stage),
            *({s for s, n in at_backward if n == c} for c in range(len(chunks))),
        ):
            assert not any(is_within(one, other) for one, other in permutations(listed, 2))


def schedule(*overrides: str, world_size: int = 1) -> Layout:
    config = build_config(*overrides)
    return schedule_layout(build_layout(config, world_size, NUM_LAYERS, has_accelerator=False), config, NUM_LAYERS)


def test_a_layout_runs_the_schedule_of_the_config() -> None:
    given = ("num_stages=2", "micro_batch_size=1", "gradient_accumulation_steps=4")
    plain, interleaved = (schedule(*given, f"schedule={name}", world_size=2) for name in ("1f1b", "interleaved"))
    assert build_schedule(plain) == OneForwardOneBackward(2, 4)
    assert build_schedule(interleaved) == Interleaved(2, 4, 2) and interleaved.num_chunks == 2
    assert schedule("micro_batch_size=2", "global_batch_size=8").num_chunks == 1


def test_all_ranks_order_a_layout_alike() -> None:
    """The main rank sends its own to processes that hash otherwise, so nothing may follow from the order of a set."""
    sizes, random = ("num_stages=4", "micro_batch_size=1", "gradient_accumulation_steps=8"), Random(0)
    layouts = [schedule(*sizes, f"schedule={name}", world_size=4) for name in SCHEDULES for _ in range(8)]
    timed = [replace(each, pass_times=draw_times(random, 4 * each.num_chunks)) for each in layouts]
    schedules = [build_schedule(each) for each in timed]
    there = subprocess.run(
        [sys.executable, "-c", ORDERS], input=pickle.dumps(schedules), capture_output=True, check=True,
        env=os.environ | {"PYTHONHASHSEED": "1", "PYTHONPATH": f"{ROOT}:{ROOT}/tests"},
    )  # fmt: skip
    assert pickle.loads(there.stdout) == [list_orders(each) for each in schedules]


TWO = ("micro_batch_size=2", "global_batch_size=8")
FOUR_STAGES = ("num_stages=4", "schedule=interleaved")
MISTAKES = {
    "no such schedule": (("schedule=gpipe", *TWO), 1, "schedule=gpipe: must be one of 1f1b, interleaved, zero_bubble"),
    "more chunks than layers": (
        (*FOUR_STAGES, "virtual_stages_per_rank=3", *TWO),
        4,
        "num_stages=4 x virtual_stages_per_rank=3 is 12 chunks, and the model has 8 layers; lower one of them, or set "
        "schedule=1f1b",
    ),
    "too few micro-batches to interleave": (
        (*FOUR_STAGES, "micro_batch_size=1", "gradient_accumulation_steps=2"),
        4,
        "schedule=interleaved needs a number of micro-batches that is a multiple of num_stages=4; "
        "gradient_accumulation_steps=2 is not, the nearest is 4; change the batch, or set schedule=1f1b",
    ),
    "micro-batches that do not divide": (
        ("num_stages=2", "schedule=interleaved", "micro_batch_size=1", "gradient_accumulation_steps=5"),
        2,
        "gradient_accumulation_steps=5 is not, the nearest is 4 or 6; change the batch",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_what_a_schedule_refuses_names_the_keys_and_the_way_out(name: str) -> None:
    overrides, world_size, message = MISTAKES[name]
    with pytest.raises(UserError) as caught:
        schedule(*overrides, world_size=world_size)
    assert message in str(caught.value)


def test_an_unknown_name_comes_with_the_known_ones() -> None:
    with pytest.raises(UserError, match=r"^schedule=1F1B: must be one of 1f1b, interleaved, zero_bubble$"):
        find_schedule("1F1B")
