"""The order in which each rank of a pipeline runs its forward and backward passes: pure, one class per schedule, found
by name in `SCHEDULES`.

A schedule is a list of units per rank and what follows from it: the chunks of layers that a rank holds, the constraints
it puts on a run, the micro-batches in flight (the plan's memory), the share of a step that is idle.
`training/engine/executor.py` runs any of them, `training/planner/simulation.py` times them. A new one is a subclass of
`Schedule` and a line in `SCHEDULES`.

P stages (pipeline ranks), V chunks of layers per rank, M micro-batches. Chunk c of the P x V, in the order of the
model, is on rank c % P; with one chunk per rank, a chunk is a stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from errors import UserError
from training.config.schema import RunConfig

if TYPE_CHECKING:  # it imports torch, for which a mistyped `schedule` need not wait
    from training.distributed.topology import Layout


class UnitKind(StrEnum):
    forward = "forward"
    backward = "backward"


class Unit(NamedTuple):
    """One pass of one micro-batch through one chunk."""

    chunk: int
    micro_batch: int
    kind: UnitKind


@dataclass(frozen=True)
class Schedule:
    """The passes of a step: num_stages P, num_micro_batches M (of one replica), num_chunks V."""

    num_stages: int
    num_micro_batches: int
    num_chunks: int = 1

    # Whether DeepSpeed's own `TrainSchedule` runs it, on its own transfers, instead of training/engine/executor.py.
    runs_on_deepspeed: ClassVar[bool] = False

    @classmethod
    def count_chunks(cls, config: RunConfig) -> int:
        """V of a run with these keys."""
        return 1

    def check(self, num_layers: int) -> None:
        """Raises UserError where the schedule cannot run a model of so many layers, embedding, norm and head included,
        in these sizes."""

    def list_units(self, stage_id: int) -> list[Unit]:
        """All passes of one rank in order.

        The two ranks of a boundary must order the passes that send and receive across it alike: messages carry no tag.
        """
        raise NotImplementedError

    def list_forward(self, stage_id: int) -> list[Unit]:
        """The forward passes of one rank in order: P micro-batches through its first chunk, the same through its next,
        ..., then the next P.

        M may be any number; an evaluation runs these alone.
        """
        stages, total = self.num_stages, self.num_micro_batches
        groups = [range(first, min(first + stages, total)) for first in range(0, total, stages)]
        return [
            Unit(number * stages + stage_id, micro_batch, UnitKind.forward)
            for group in groups
            for number in range(self.num_chunks)
            for micro_batch in group
        ]

    @cache
    def list_in_flight(self, stage_id: int) -> frozenset[tuple[int, ...]]:
        """How many micro-batches each chunk of a rank holds for its backward pass: all combinations [V] that a forward
        pass ends with."""
        held, found = [0] * self.num_chunks, set()
        for unit in self.list_units(stage_id):
            number = unit.chunk // self.num_stages
            if unit.kind is UnitKind.forward:
                held[number] += 1
                found.add(tuple(held))
            else:
                held[number] -= 1
        return frozenset(found)

    @property
    def bubble_share(self) -> float:
        """The share of a step that a rank of an even pipeline waits (GPipe, 1811.06965; 2104.04473)."""
        return (self.num_stages - 1) / (self.num_chunks * self.num_micro_batches + self.num_stages - 1)

    @property
    def bubble_formula(self) -> str:
        """`bubble_share` as the plan prints it."""
        return f"(P-1)/({'V ' if self.num_chunks > 1 else ''}M+P-1)"


class OneForwardOneBackward(Schedule):
    """1F1B (PipeDream-Flush, 2006.09503), as DeepSpeed orders it: at most P - stage_id micro-batches are in flight."""

    runs_on_deepspeed = True

    def list_units(self, stage_id: int) -> list[Unit]:
        forward = self.list_forward(stage_id)
        backward = [unit._replace(kind=UnitKind.backward) for unit in forward]
        return _alternate(forward, backward, ahead=self.num_stages - 1 - stage_id)


class Interleaved(Schedule):
    """Interleaved 1F1B (2104.04473): V chunks per rank, so that the pipeline fills V times as fast."""

    @classmethod
    def count_chunks(cls, config: RunConfig) -> int:
        return config.virtual_stages_per_rank

    def check(self, num_layers: int) -> None:
        stages, micro_batches = self.num_stages, self.num_micro_batches
        chunks = stages * self.num_chunks
        if chunks > num_layers:
            raise UserError(
                f"num_stages={stages} x virtual_stages_per_rank={self.num_chunks} is {chunks} chunks, and the model "
                f"has {num_layers} layers; lower one of them, or set schedule=1f1b"
            )
        if micro_batches % stages:
            below = micro_batches // stages * stages
            nearest = f"{below} or {below + stages}" if below else f"{stages}"
            raise UserError(
                f"schedule=interleaved needs a number of micro-batches that is a multiple of num_stages={stages}; "
                f"gradient_accumulation_steps={micro_batches} is not, the nearest is {nearest}; change the batch, or "
                "set schedule=1f1b"
            )

    def list_units(self, stage_id: int) -> list[Unit]:
        """M must be a multiple of P, or a rank may wait for what it would send itself."""
        last = self.num_stages * self.num_chunks - 1
        to_the_end = self.num_stages - 1 - stage_id
        mirrored = self.list_forward(to_the_end)
        backward = [Unit(last - unit.chunk, unit.micro_batch, UnitKind.backward) for unit in mirrored]
        ahead = 2 * to_the_end + (self.num_chunks - 1) * self.num_stages
        return _alternate(self.list_forward(stage_id), backward, ahead)


def _alternate(forward: Sequence[Unit], backward: Sequence[Unit], ahead: int) -> list[Unit]:
    """`ahead` forward passes, then one forward, one backward in turn, then the backward passes that are left."""
    units = [*forward[:ahead]]
    for number, unit in enumerate(backward):
        units += forward[ahead + number : ahead + number + 1]
        units.append(unit)
    return units


SCHEDULES: dict[str, type[Schedule]] = {
    "1f1b": OneForwardOneBackward,
    "interleaved": Interleaved,
}


def find_schedule(name: str) -> type[Schedule]:
    """The value of the key `schedule`. Raises UserError for an unknown one."""
    if name not in SCHEDULES:
        raise UserError(f"schedule={name}: must be one of {', '.join(SCHEDULES)}")
    return SCHEDULES[name]


def build_schedule(layout: Layout) -> Schedule:
    """The schedule that a layout runs."""
    return find_schedule(layout.schedule)(layout.num_stages, layout.gradient_accumulation_steps, layout.num_chunks)


def schedule_layout(layout: Layout, config: RunConfig, num_layers: int) -> Layout:
    """The layout under `config.schedule`. Raises UserError where the schedule is unknown or cannot run it."""
    name = config.schedule
    scheduled = replace(layout, schedule=name, num_chunks=find_schedule(name).count_chunks(config))
    build_schedule(scheduled).check(num_layers)
    return scheduled
