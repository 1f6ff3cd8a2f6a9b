"""Plays the instructions of all ranks of a schedule through, without processes: do ranks wait for each other?"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from training.distributed.p2p import SENDS_IN_FLIGHT
from training.engine.executor import InstructionSchedule
from training.pipeline.schedule import Schedule, UnitKind

LINK_OF_RECEIVE = {"RecvActivation": UnitKind.forward, "RecvGrad": UnitKind.backward}
LINK_OF_SEND = {"SendActivation": UnitKind.forward, "SendGrad": UnitKind.backward}
LINK_OF_PASS = {"ForwardPass": UnitKind.forward, "BackwardPass": UnitKind.backward}


def play(schedule: Schedule, forward_only: bool = False) -> list[int]:
    """With sends that nothing buffers: on a link the n-th send goes to the n-th receive that is posted.

    Returns how many instructions each rank could not execute, because all wait for each other.
    """
    return _Player(schedule, forward_only).play()


class _Player:
    """A link is named by what crosses it and the stage that it leads to."""

    def __init__(self, schedule: Schedule, forward_only: bool) -> None:
        self.num_stages, self.micro_batches = schedule.num_stages, schedule.num_micro_batches
        ranks = [InstructionSchedule(schedule, stage, forward_only) for stage in range(self.num_stages)]
        self.programs = [[command for step in rank.steps() for command in step] for rank in ranks]
        self.sent: dict[Any, list[int]] = defaultdict(list)  # by link: buffers in the order of sending,
        self.posted: dict[Any, list[int]] = defaultdict(list)  # of posting a receive,
        self.received: dict[Any, list[int]] = defaultdict(list)  # and of having waited for it

    def play(self) -> list[int]:
        left = [list(program) for program in self.programs]
        moved = True
        while moved:
            moved = False
            for stage, commands in enumerate(left):
                while commands and self.executes(stage, commands[0]):
                    commands.pop(0)
                    moved = True
        if not any(left):
            for link in {*self.sent, *self.posted}:
                assert len(self.sent[link]) == len(self.posted[link]) and self.received[link] == self.posted[link]
        return [len(commands) for commands in left]

    def executes(self, stage: int, command: Any) -> bool:
        """False where it has to wait."""
        if command.name == "StartRecv":
            self.posted[command.kind, stage].append(command.buffer_id)
        elif command.name in LINK_OF_RECEIVE:
            return self.receives(LINK_OF_RECEIVE[command.name], stage, command.buffer_id)
        elif command.name in LINK_OF_SEND:
            return self.sends(self.link_from(LINK_OF_SEND[command.name], stage), command.buffer_id)
        elif command.name in LINK_OF_PASS:  # whose input has come, where it has one
            link = LINK_OF_PASS[command.name], stage
            assert command.buffer_id not in self.posted[link] or command.buffer_id in self.received[link]
        elif command.name == "FinishSends":
            links = [self.link_from(kind, stage) for kind in UnitKind]
            return all(len(self.posted[link]) >= len(self.sent[link]) for link in links)
        return True

    def link_from(self, kind: UnitKind, stage: int) -> tuple[UnitKind, int]:
        return kind, (stage + (1 if kind is UnitKind.forward else -1)) % self.num_stages

    def sends(self, link: tuple[UnitKind, int], buffer_id: int) -> bool:
        if len(self.sent[link]) - len(self.posted[link]) >= SENDS_IN_FLIGHT:
            return False
        self.sent[link].append(buffer_id)
        return True

    def receives(self, kind: UnitKind, stage: int, buffer_id: int) -> bool:
        """What has come is of the chunk before, or after, and of the same micro-batch."""
        link = kind, stage
        number = self.posted[link].index(buffer_id)
        if number >= len(self.sent[link]):
            return False
        step = -1 if kind is UnitKind.forward else 1
        chunk, micro_batch = divmod(buffer_id, self.micro_batches)
        other, other_micro_batch = divmod(self.sent[link][number], self.micro_batches)
        assert other_micro_batch == micro_batch
        assert other * self.num_stages + (stage + step) % self.num_stages == chunk * self.num_stages + stage + step
        self.received[link].append(buffer_id)
        return True
