"""The order in which each rank of a pipeline runs its forward and backward passes: pure, one class per schedule.

A schedule is a list of units per rank and the quantities that follow from it: the chunks of layers that a rank holds,
the constraints it puts on a run, the micro-batches in flight (the plan's memory), the share of a step that is idle.
`training/engine/runner.py` runs any of them, `training/costs/simulation.py` times them. A new one is a subclass of
`Schedule` and a line in the table of `training/pipeline/schedules.py`.

P stages (pipeline ranks), V chunks of layers per rank, M micro-batches. Chunk c of the P x V, in the order of the
model, is on rank c % P, unless a schedule says otherwise; with one chunk per rank, a chunk is a stage.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import ClassVar, NamedTuple

from errors import UserError


class UnitKind(StrEnum):
    """A backward pass is whole, or in two: the gradients of a chunk's input, then those of its weights (2401.10241)."""

    forward = "forward"
    backward = "backward"
    input_backward = "input_backward"
    weight_backward = "weight_backward"


class Unit(NamedTuple):
    """One pass of one micro-batch through one chunk."""

    chunk: int
    micro_batch: int
    kind: UnitKind


class PassTimes(NamedTuple):
    """The times of one micro-batch's passes through one chunk: nanoseconds in a layout; in a test any unit."""

    forward: float
    input_backward: float  # the whole backward pass, but for what `weight_backward` takes
    weight_backward: float  # what a schedule can put off

    def find(self, kind: UnitKind) -> float:
        """Return the time of a pass of this kind."""
        if kind is UnitKind.backward:
            return self.input_backward + self.weight_backward
        return float(getattr(self, kind.value))


EVEN = PassTimes(1, 1, 1)  # a backward pass takes as long as two forward passes


class InFlight(NamedTuple):
    """Micro-batches of each chunk of a rank [V]: held for their backward pass, and for the second half of it alone."""

    held: tuple[int, ...]
    deferred: tuple[int, ...]


def _keep_largest(states: Collection[InFlight]) -> frozenset[InFlight]:
    """Return the states of which no other one has at least as much of each chunk: those that can take most memory,
    whatever a chunk takes."""
    largest: list[tuple[int, ...]] = []
    for state in sorted(((*held, *deferred) for held, deferred in states), key=sum, reverse=True):
        if not any(all(map(operator.ge, other, state)) for other in largest):
            largest.append(state)
    return frozenset(InFlight(state[: len(state) // 2], state[len(state) // 2 :]) for state in largest)


@dataclass(frozen=True)
class Schedule:
    """The passes of a step: num_stages P, num_micro_batches M (of one replica), num_chunks V. pass_times: of each chunk
    [P x V]; empty where all are `EVEN`."""

    num_stages: int
    num_micro_batches: int
    num_chunks: int = 1
    pass_times: tuple[PassTimes, ...] = ()

    # Whether it has backward passes in two, so that layers must be able to put off the gradients of weights.
    splits_backward: ClassVar[bool] = False

    @classmethod
    def count_chunks(cls, virtual_stages: int) -> int:
        """Return V. virtual_stages: the key `virtual_stages_per_rank`."""
        return 1

    def check(self, num_layers: int) -> None:
        """Raises UserError where the schedule cannot run a model of so many layers, embedding, norm and head included,
        in these sizes."""

    @property
    def last_chunk(self) -> int:
        """The one that ends with the loss."""
        return self.num_stages * self.num_chunks - 1

    def find_stage(self, chunk: int) -> int:
        """Return the rank that holds a chunk."""
        return chunk % self.num_stages

    @property
    def times(self) -> tuple[PassTimes, ...]:
        """The times of the passes of each chunk [P x V]."""
        return self.pass_times or (EVEN,) * (self.last_chunk + 1)

    @cache
    def list_chunks(self, stage_id: int) -> tuple[int, ...]:
        """Return the chunks of a rank, in the order of the model."""
        chunks = range(self.num_stages * self.num_chunks)
        return tuple(chunk for chunk in chunks if self.find_stage(chunk) == stage_id)

    def is_first_of_rank(self, chunk: int) -> bool:
        """Returns whether micro-batches reach the chunk's rank for the first time: with their integers, which it
        keeps."""
        return chunk == self.list_chunks(self.find_stage(chunk))[0]

    def target_fraction(self, chunk: int) -> float:
        """Return the target fraction of its rank's work for a chunk."""
        return 1 / self.num_chunks

    def list_links(self) -> list[tuple[UnitKind, int, int]]:
        """Return (kind, from rank, to rank) of the links between ranks; forward for activations, backward for
        gradients."""
        pairs = [(self.find_stage(chunk), self.find_stage(chunk + 1)) for chunk in range(self.last_chunk)]
        forth = dict.fromkeys((UnitKind.forward, start, stop) for start, stop in pairs if start != stop)
        return [*forth, *((UnitKind.backward, stop, start) for _, start, stop in forth)]

    def list_boundaries(self) -> list[tuple[int, int]]:
        """Return the pairs of ranks that send to each other, the lower rank first."""
        return sorted({(min(start, stop), max(start, stop)) for _, start, stop in self.list_links()})

    def list_units(self, stage_id: int) -> list[Unit]:
        """Return all passes of one rank in order.

        The two ranks of a boundary must order the passes that send and receive across it alike: messages carry no tag.
        """
        raise NotImplementedError

    def list_forward(self, stage_id: int) -> list[Unit]:
        """Return the forward passes of one rank in order: P micro-batches through its first chunk, the same through its
        next, ..., then the next P.

        M may be any number; an evaluation runs these alone.
        """
        stages, total = self.num_stages, self.num_micro_batches
        groups = [range(first, min(first + stages, total)) for first in range(0, total, stages)]
        return [
            Unit(chunk, micro_batch, UnitKind.forward)
            for group in groups
            for chunk in self.list_chunks(stage_id)
            for micro_batch in group
        ]

    @cache
    def list_in_flight(self, stage_id: int) -> frozenset[InFlight]:
        """Return the largest states in flight of a rank after a forward pass, or the first half of a backward pass."""
        ends = (UnitKind.forward, UnitKind.input_backward)
        return _keep_largest({after for unit, _, after in self._follow(stage_id) if unit.kind in ends})

    @cache
    def list_backward(self, stage_id: int) -> frozenset[tuple[InFlight, int]]:
        """Return the largest states in flight of a rank as a backward pass begins, each with the index of its chunk on
        the rank."""
        begins = (UnitKind.backward, UnitKind.input_backward)
        states: dict[int, set[InFlight]] = {chunk: set() for chunk in self.list_chunks(stage_id)}
        for unit, before, _ in self._follow(stage_id):
            if unit.kind in begins:
                states[unit.chunk].add(before)
        return frozenset(
            (state, number) for number, each in enumerate(states.values()) for state in _keep_largest(each)
        )

    def _follow(self, stage_id: int) -> Iterator[tuple[Unit, InFlight, InFlight]]:
        """The passes of one rank, with what it holds before and after each."""
        chunks = self.list_chunks(stage_id)
        held, deferred = [0] * len(chunks), [0] * len(chunks)
        before = InFlight(tuple(held), tuple(deferred))
        for unit in self.list_units(stage_id):
            number = chunks.index(unit.chunk)
            if unit.kind is UnitKind.forward:
                held[number] += 1
            elif unit.kind is UnitKind.weight_backward:
                deferred[number] -= 1
            else:
                held[number] -= 1
                deferred[number] += unit.kind is UnitKind.input_backward
            after = InFlight(tuple(held), tuple(deferred))
            yield unit, before, after
            before = after

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

    def list_units(self, stage_id: int) -> list[Unit]:
        forward = self.list_forward(stage_id)
        backward = [unit._replace(kind=UnitKind.backward) for unit in forward]
        return _alternate(forward, backward, ahead=self.num_stages - 1 - stage_id)

    @cache
    def list_in_flight(self, stage_id: int) -> frozenset[InFlight]:
        return frozenset({InFlight((min(self.num_stages - stage_id, self.num_micro_batches),), (0,))})

    @cache
    def list_backward(self, stage_id: int) -> frozenset[tuple[InFlight, int]]:
        return frozenset((held, 0) for held in self.list_in_flight(stage_id))


class Interleaved(Schedule):
    """Interleaved 1F1B (2104.04473): V chunks per rank, so that the pipeline fills V times as fast."""

    @classmethod
    def count_chunks(cls, virtual_stages: int) -> int:
        return virtual_stages

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
