"""The zero-bubble schedule in the shape of a V: which pass each rank runs when, found by trying a few rules.

Backward passes come in two (2401.10241): the gradients of a chunk's input at once, since the stage before waits for
them; those of its weights where the rank would wait. Each rank has two chunks, r and 2 P - 1 - r (2405.15362), so the
first rank has the embedding and the head, and the first backward pass begins where the last forward pass ended.

A rank takes, of the passes whose input has come, the one that can start first; a backward pass before a forward pass,
a later chunk before an earlier one. It takes a weight pass where the others would leave it waiting, or no memory is
left. What counts as waiting, and how long a backward pass is waited for, are the rules that are tried; the order in
which a simulated step ends first is taken. All ranks compute it from the same numbers, so they agree.

P stages, M micro-batches.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, NamedTuple

from errors import UserError
from training.pipeline.schedule import Schedule, Unit, UnitKind


class PassTimes(NamedTuple):
    """The times of the passes of one chunk, in any unit."""

    forward: float
    input_backward: float
    weight_backward: float


EVEN = PassTimes(1.0, 1.0, 1.0)
CHUNKS = 2  # of a rank
_GAPS = (0.0, 0.25, 0.5, 0.75, 1.0)  # a wait as long as this share of a weight pass is filled with one
_PREFERENCES = (0.0, 0.25, 0.5)  # a backward pass is taken if it starts so much later, in forward passes
_ROUNDING = 1 + 1e-9  # of sums of the same seconds in another order
_RESERVES = (1, 2)  # chunks of memory that a rank's first chunk leaves for its second


def default_memory_limit(num_stages: int) -> int:
    """Return the default number of micro-batches in flight: 1F1B's most, and enough more that uneven passes leave few
    gaps."""
    return num_stages + max(1, num_stages // 4)


@dataclass(frozen=True)
class ZeroBubble(Schedule):
    """memory_limit: micro-batches in flight on a rank, counted until their last weight pass; None for
    `default_memory_limit`. pass_times: of each chunk [2 P]; empty where all are even."""

    num_chunks: int = CHUNKS
    memory_limit: int | None = None
    pass_times: tuple[PassTimes, ...] = ()

    splits_backward: ClassVar[bool] = True

    @classmethod
    def count_chunks(cls, virtual_stages: int) -> int:
        return CHUNKS

    @property
    def limit(self) -> int:
        """Micro-batches in flight."""
        return self.memory_limit or default_memory_limit(self.num_stages)

    def check(self, num_layers: int) -> None:
        stages, chunks = self.num_stages, self.num_stages * CHUNKS
        if chunks > num_layers:
            raise UserError(
                f"schedule=zero_bubble cuts the model into two chunks a stage, num_stages={stages} x 2 = {chunks}, and "
                f"it has {num_layers} layers; lower num_stages, or set schedule=1f1b"
            )
        if self.num_micro_batches < stages:
            raise UserError(
                f"schedule=zero_bubble needs at least num_stages={stages} micro-batches to fill the pipeline, and "
                f"gradient_accumulation_steps={self.num_micro_batches}; give at least {stages}, or set schedule=1f1b"
            )

    def find_stage(self, chunk: int) -> int:
        return min(chunk, self.last_chunk - chunk)

    def target_fraction(self, chunk: int) -> float:
        """Return a half, but of two ranks the second waits for one forward pass of the first chunk, which is all that
        its bubble is: a quarter (simulated, 4 to 16 micro-batches; with less the first rank runs dry at the end, and
        with more ranks uneven chunks wait for each other)."""
        if self.num_stages == 2 and chunk in (0, self.last_chunk):
            return 0.75 if chunk else 0.25
        return super().target_fraction(chunk)

    def list_units(self, stage_id: int) -> list[Unit]:
        return list(self._order.units[stage_id])

    def list_forward(self, stage_id: int) -> list[Unit]:
        times = self.pass_times or (EVEN,) * (self.last_chunk + 1)
        rules = _Rules(self.num_stages, self.num_micro_batches, times, None, forward_only=True)
        order = _arrange(rules)
        assert order is not None
        return list(order.units[stage_id])

    @property
    def _order(self) -> Order:
        times = self.pass_times or (EVEN,) * (self.last_chunk + 1)
        return find_order(self.num_stages, self.num_micro_batches, times, self.limit)

    @property
    def bubble_share(self) -> float:
        """The idle share of the rank that works longest, with these times."""
        times = self.pass_times or (EVEN,) * (self.last_chunk + 1)
        work = [
            self.num_micro_batches * sum(sum(times[chunk]) for chunk in self.list_chunks(stage))
            for stage in range(self.num_stages)
        ]
        return 1 - max(work) / self._order.seconds

    @property
    def bubble_formula(self) -> str:
        return f"simulated, {self.limit} micro-batches in flight"


class Order(NamedTuple):
    """units: of each rank, in order. seconds: when a simulated step ends."""

    units: tuple[tuple[Unit, ...], ...]
    seconds: float


@cache
def find_order(num_stages: int, num_micro_batches: int, times: tuple[PassTimes, ...], limit: int) -> Order:
    """Return the best order that the rules give. times: of each chunk [2 P]. limit: micro-batches in flight."""
    tried = (
        _Rules(num_stages, num_micro_batches, times, limit * CHUNKS, gap=gap, preference=preference, reserve=reserve)
        for gap, preference, reserve in itertools.product(_GAPS, _PREFERENCES, _RESERVES)
        if reserve < limit * CHUNKS
    )
    best: Order | None = None
    for rules in tried:
        order = _arrange(rules, math.inf if best is None else best.seconds)
        if order is not None and (best is None or order.seconds < best.seconds):
            best = order
    assert best is not None
    return best


@dataclass(frozen=True)
class _Rules:
    """limit: chunks of micro-batches that a rank may hold; None for any number."""

    num_stages: int
    num_micro_batches: int
    times: Sequence[PassTimes]
    limit: int | None
    gap: float = 0.0
    preference: float = 0.0
    reserve: int = 1
    forward_only: bool = False


def _arrange(rules: _Rules, most: float = math.inf) -> Order | None:
    """None where the step would end after `most` seconds."""
    return _Step(rules).run(most)


class _Step:
    """One simulated step."""

    def __init__(self, rules: _Rules) -> None:
        self._rules = rules
        chunks = 2 * rules.num_stages
        self._last = chunks - 1
        self._done = {kind: [0] * chunks for kind in UnitKind}  # micro-batches of each chunk
        self._stops: dict[Unit, float] = {}
        self._free, self._held = [0.0] * rules.num_stages, [0] * rules.num_stages
        self._units: list[list[Unit]] = [[] for _ in range(rules.num_stages)]
        self._left = [
            rules.num_micro_batches * sum(sum(rules.times[chunk]) for chunk in (stage, self._last - stage))
            for stage in range(rules.num_stages)
        ]  # seconds of the passes that each rank has yet to run

    def run(self, most: float) -> Order | None:
        """Return the order; None as soon as a rank cannot end within `most` seconds, as it has waited too long."""
        rules = self._rules
        kinds = 1 if rules.forward_only else 3
        choices: dict[int, tuple[float, Unit] | None] = {}
        changed = set(range(rules.num_stages))
        for _ in range(kinds * len(rules.times) * rules.num_micro_batches):
            choices |= {stage: self._choose(stage) for stage in changed}
            start, stage, unit = min(
                (choice[0], stage, choice[1]) for stage, choice in choices.items() if choice is not None
            )
            changed = self._take(stage, unit, start)
            if self._free[stage] + self._left[stage] > most * _ROUNDING:
                return None
        return Order(tuple(map(tuple, self._units)), max(self._free))

    def _take(self, stage: int, unit: Unit, start: float) -> set[int]:
        """Runs a pass; returns the ranks that may choose anew."""
        stop = start + self._seconds(unit)
        self._free[stage] = self._stops[unit] = stop
        self._left[stage] -= self._seconds(unit)
        self._done[unit.kind][unit.chunk] += 1
        self._units[stage].append(unit)
        if unit.kind is UnitKind.weight_backward:
            self._held[stage] -= 1
            return {stage}
        self._held[stage] += unit.kind is UnitKind.forward and not self._rules.forward_only
        following = unit.chunk + (1 if unit.kind is UnitKind.forward else -1)
        return {stage, self._stage_of(following)} if 0 <= following <= self._last else {stage}

    def _choose(self, stage: int) -> tuple[float, Unit] | None:
        """The start and the unit that the rank would run next; None while nothing has arrived or is deferred."""
        ready = [*self._list_forward(stage), *self._list_backward(stage)]
        put_off = [
            Unit(chunk, self._done[UnitKind.weight_backward][chunk], UnitKind.weight_backward)
            for chunk in (self._last - stage, stage)
            if self._done[UnitKind.weight_backward][chunk] < self._done[UnitKind.input_backward][chunk]
        ]
        weights = min(put_off, key=lambda unit: unit.micro_batch, default=None)
        if not ready:
            return None if weights is None else (self._free[stage], weights)
        *_, start, unit = min(ready)
        if weights is not None and start - self._free[stage] > self._rules.gap * self._seconds(weights):
            return self._free[stage], weights
        return start, unit

    def _list_forward(self, stage: int) -> list[tuple[float, int, int, float, Unit]]:
        found = []
        for chunk in (stage, self._last - stage):
            reserve = self._rules.reserve if chunk == stage else 0
            unit = Unit(chunk, self._done[UnitKind.forward][chunk], UnitKind.forward)
            if unit.micro_batch == self._rules.num_micro_batches or (
                self._rules.limit is not None and self._held[stage] >= self._rules.limit - reserve
            ):
                continue
            came = self._stops.get(unit._replace(chunk=chunk - 1)) if chunk else 0.0
            if came is not None:
                start = max(came, self._free[stage])
                found.append((start, 1, -chunk, start, unit))
        return found

    def _list_backward(self, stage: int) -> list[tuple[float, int, int, float, Unit]]:
        found = []
        for chunk in (stage, self._last - stage):
            unit = Unit(chunk, self._done[UnitKind.input_backward][chunk], UnitKind.input_backward)
            if self._rules.forward_only or unit.micro_batch == self._done[UnitKind.forward][chunk]:
                continue
            before = unit._replace(kind=UnitKind.forward) if chunk == self._last else unit._replace(chunk=chunk + 1)
            came = self._stops.get(before)
            if came is not None:
                start = max(came, self._free[stage])
                preferred = start - self._rules.preference * self._rules.times[chunk].forward
                found.append((preferred, 0, chunk, start, unit))
        return found

    def _seconds(self, unit: Unit) -> float:
        return getattr(self._rules.times[unit.chunk], unit.kind.value)

    def _stage_of(self, chunk: int) -> int:
        return min(chunk, self._last - chunk)
