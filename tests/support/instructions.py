"""Plays the instructions of all ranks of a schedule through, without processes: do ranks wait for each other?"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from training.distributed.p2p import SENDS_IN_FLIGHT
from training.engine.executor import InstructionSchedule
from training.pipeline.schedule import Schedule, UnitKind


def play(schedule: Schedule, forward_only: bool = False) -> list[int]:
    """The instructions of all ranks, with sends that nothing buffers: on a link the n-th send goes to the n-th receive
    that is posted.

    Returns how many instructions each rank could not execute, because all wait for each other.
    """
    num_stages, micro_batches = schedule.num_stages, schedule.num_micro_batches
    ranks = [InstructionSchedule(schedule, stage, forward_only) for stage in range(num_stages)]
    programs = [[command for step in rank.steps() for command in step] for rank in ranks]
    position = [0] * num_stages
    sent: dict[Any, list[int]] = defaultdict(list)  # by link: buffers in the order of sending, and of posting
    posted: dict[Any, list[int]] = defaultdict(list)

    def is_ready(stage: int, command: Any) -> bool:
        if command.name == "StartRecv":
            posted["act" if command.kind is UnitKind.forward else "grad", stage].append(command.buffer_id)
        elif command.name in ("RecvActivation", "RecvGrad"):
            link = ("act" if command.name == "RecvActivation" else "grad"), stage
            number = posted[link].index(command.buffer_id)
            if number >= len(sent[link]):
                return False
            # what has come: of the chunk before, or after, and of the same micro-batch
            step = -1 if link[0] == "act" else 1
            chunk, micro_batch = divmod(command.buffer_id, micro_batches)
            other, other_micro_batch = divmod(sent[link][number], micro_batches)
            assert other_micro_batch == micro_batch
            assert other * num_stages + (stage + step) % num_stages == chunk * num_stages + stage + step
        elif command.name in ("SendActivation", "SendGrad"):
            link = (
                ("act", (stage + 1) % num_stages)
                if command.name == "SendActivation"
                else ("grad", (stage - 1) % num_stages)
            )
            if len(sent[link]) - len(posted[link]) >= SENDS_IN_FLIGHT:
                return False
            sent[link].append(command.buffer_id)
        elif command.name == "FinishSends":
            links = ("act", (stage + 1) % num_stages), ("grad", (stage - 1) % num_stages)
            return all(len(posted[link]) >= len(sent[link]) for link in links)
        return True

    moved = True
    while moved:
        moved = False
        for stage, program in enumerate(programs):
            while position[stage] < len(program) and is_ready(stage, program[position[stage]]):
                position[stage] += 1
                moved = True
    assert all(len(sent[link]) == len(posted[link]) for link in {*sent, *posted}) or any(
        p < len(q) for p, q in zip(position, programs, strict=True)
    )
    return [len(program) - place for place, program in zip(position, programs, strict=True)]
