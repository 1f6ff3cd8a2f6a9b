"""Plays the instructions of all ranks of a schedule through, without processes: do ranks wait for each other?"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from training.engine.executor import InstructionSchedule
from training.pipeline.schedule import Schedule, UnitKind

RECEIVES = {"RecvActivation": UnitKind.forward, "RecvGrad": UnitKind.backward}
SENDS = {"SendActivation": UnitKind.forward, "SendGrad": UnitKind.backward}
PASSES = {"ForwardPass": UnitKind.forward, "BackwardPass": UnitKind.backward}
Link = tuple[UnitKind, int, int]  # what crosses it, the stages that it leads from and to


def play(schedule: Schedule, forward_only: bool = False) -> list[int]:
    """Executes a schedule with unbuffered sends: on a link the n-th send goes to the n-th receive that is posted.

    Returns how many instructions each rank could not execute, because all wait for each other.
    """
    return _Player(schedule, forward_only).play()


class _Player:
    """Executes the instructions of all ranks. A message on a link is named (receiving chunk, micro-batch)."""

    def __init__(self, schedule: Schedule, forward_only: bool) -> None:
        self.schedule = schedule
        ranks = [InstructionSchedule(schedule, stage, forward_only) for stage in range(schedule.num_stages)]
        self.programs = [[command for step in rank.steps() for command in step] for rank in ranks]
        self.sent: dict[Link, list[Any]] = defaultdict(list)  # in the order of sending,
        self.posted: dict[Link, list[Any]] = defaultdict(list)  # of posting a receive,
        self.received: dict[Link, list[Any]] = defaultdict(list)  # and of having waited for it
        self.there: set[Any] = set()  # what a rank has handed on to itself

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
            assert {*self.sent, *self.posted} <= {*self.schedule.list_links()}
            for link in {*self.sent, *self.posted}:
                assert self.sent[link] == self.posted[link] == self.received[link]
        return [len(commands) for commands in left]

    def link_to(self, kind: UnitKind, chunk: int) -> Link:
        """Returns the link by which the input of a pass through `chunk` arrives."""
        source = chunk - 1 if kind is UnitKind.forward else chunk + 1
        return kind, self.schedule.find_stage(source), self.schedule.find_stage(chunk)

    def executes(self, stage: int, command: Any) -> bool:
        """False where it has to wait."""
        if command.name == "FinishSends":
            return all(
                len(self.posted[link]) >= len(self.sent[link])
                for link in self.schedule.list_links()
                if link[1] == stage
            )
        if not hasattr(command, "chunk"):
            return True
        item = command.chunk, command.buffer_id % self.schedule.num_micro_batches
        if command.name == "StartRecv":
            kind = UnitKind.forward if command.kind is UnitKind.forward else UnitKind.backward
            self.posted[self.link_to(kind, command.chunk)].append(item)
        elif command.name in RECEIVES:
            return self.receives(self.link_to(RECEIVES[command.name], command.chunk), item)
        elif command.name in SENDS:
            return self.sends(SENDS[command.name], *item, is_here=command.to is not None)
        elif command.name in PASSES:
            self.check_input(PASSES[command.name], *item)
        return True

    def sends(self, kind: UnitKind, chunk: int, micro_batch: int, *, is_here: bool) -> bool:
        to = chunk + (1 if kind is UnitKind.forward else -1)
        if is_here:
            self.there.add((kind, to, micro_batch))
            return True
        link = self.link_to(kind, to)
        most = self.schedule.sends_in_flight
        if most is not None and len(self.sent[link]) - len(self.posted[link]) >= most:
            return False
        self.sent[link].append((to, micro_batch))
        return True

    def receives(self, link: Link, item: Any) -> bool:
        """The n-th that is received is the n-th that was sent."""
        number = self.posted[link].index(item)
        if number >= len(self.sent[link]):
            return False
        assert self.sent[link][number] == item
        self.received[link].append(item)
        return True

    def check_input(self, kind: UnitKind, chunk: int, micro_batch: int) -> None:
        """A pass has what it needs."""
        source = chunk - 1 if kind is UnitKind.forward else chunk + 1
        if not 0 <= source <= self.schedule.last_chunk:
            return
        if self.schedule.find_stage(source) == self.schedule.find_stage(chunk):
            assert (kind, chunk, micro_batch) in self.there
        else:
            assert (chunk, micro_batch) in self.received[self.link_to(kind, chunk)]
