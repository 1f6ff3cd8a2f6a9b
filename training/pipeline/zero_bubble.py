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
from training.pipeline.schedule import PassTimes, Schedule, Unit, UnitKind

CHUNKS = 2  # of a rank
_GAPS = (0.0, 0.25, 0.5, 0.75, 1.0)  # a wait as long as this share of a weight pass is filled with one
_PREFERENCES = (0.0, 0.25, 0.5)  # a backward pass is taken if it starts so much later, in forward passes
_ROUNDING = 1 + 1e-9  # of sums of the same seconds in another order
_RESERVES = (1, 2)  # chunks of memory that a rank's first chunk leaves for its second


def default_max_in_flight(num_stages: int) -> int:
    """Return the default number of micro-batches in flight: 1F1B's most, and enough more that uneven passes leave few
    gaps."""
    return num_stages + max(1, num_stages // 4)


@dataclass(frozen=True)
class ZeroBubble(Schedule):
    """max_in_flight: micro-batches in flight on a rank, counted until their last weight pass; None for
    `default_max_in_flight`."""

    num_chunks: int = CHUNKS
    max_in_flight: int | None = None

    splits_backward: ClassVar[bool] = True

    @classmethod
    def count_chunks(cls, virtual_stages: int) -> int:
        return CHUNKS

    @property
    def limit(self) -> int:
        """Micro-batches in flight."""
        return self.max_in_flight or default_max_in_flight(self.num_stages)

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
        rules = _Rules(self.num_stages, self.num_micro_batches, self.times, None, forward_only=True)
        order = _arrange(rules)
        assert order is not None
        return list(order.units[stage_id])

    @property
    def _order(self) -> Order:
        return find_order(self.num_stages, self.num_micro_batches, self.times, self.limit)

    @property
    def bubble_share(self) -> float:
        """The idle share of the rank that works longest, with these times."""
        work = [
            self.num_micro_batches * sum(sum(self.times[chunk]) for chunk in self.list_chunks(stage))
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
    """Return the best order that the rules give. times: of each chunk [2 P]. limit: micro-batches in flight.

    No order is better than one in which a rank waits for nothing but its first input; then no further rules are tried.
    """
    chunks = [(stage, 2 * num_stages - 1 - stage) for stage in range(num_stages)]
    work = (num_micro_batches * sum(sum(times[chunk]) for chunk in each) for each in chunks)
    entering = itertools.accumulate((each.forward for each in times[: num_stages - 1]), initial=0)
    least = max(map(sum, zip(entering, work, strict=True)))
    tried = (
        _Rules(num_stages, num_micro_batches, times, limit * CHUNKS, gap=gap, preference=preference, reserve=reserve)
        for gap, preference, reserve in itertools.product(_GAPS, _PREFERENCES, _RESERVES)
        if reserve < limit * CHUNKS
    )
    best: Order | None = None
    for rules in tried:
        if best is not None and best.seconds <= least:
            break
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


class _Choice(NamedTuple):
    """The pass that a rank would run next."""

    start: float
    stage: int
    chunk: int
    kind: UnitKind


class _Step:
    """One simulated step: tens of thousands of choices for each set of rules, so without a unit for each."""

    def __init__(self, rules: _Rules) -> None:
        self._rules = rules
        chunks = 2 * rules.num_stages
        self._last = chunks - 1
        # When the passes of each chunk ended, by micro-batch
        self._ended: dict[UnitKind, list[list[float]]] = {kind: [[] for _ in range(chunks)] for kind in UnitKind}
        self._forward = self._ended[UnitKind.forward]
        self._input_backward = self._ended[UnitKind.input_backward]
        self._weight_backward = self._ended[UnitKind.weight_backward]
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
        choices: dict[int, _Choice] = {}
        changed: tuple[int, ...] = tuple(range(rules.num_stages))
        for _ in range(kinds * len(rules.times) * rules.num_micro_batches):
            for stage in changed:
                choice = self._choose(stage)
                if choice is None:
                    choices.pop(stage, None)
                else:
                    choices[stage] = choice
            chosen = min(choices.values())
            changed, stage = self._take(chosen), chosen.stage
            if self._free[stage] + self._left[stage] > most * _ROUNDING:
                return None
        return Order(tuple(map(tuple, self._units)), max(self._free))

    def _take(self, choice: _Choice) -> tuple[int, ...]:
        """Runs a pass; returns the ranks that may choose anew."""
        start, stage, chunk, kind = choice
        seconds, ended = getattr(self._rules.times[chunk], kind.value), self._ended[kind][chunk]
        self._units[stage].append(Unit(chunk, len(ended), kind))
        self._free[stage] = start + seconds
        self._left[stage] -= seconds
        ended.append(self._free[stage])
        if kind is UnitKind.weight_backward:
            self._held[stage] -= 1
            return (stage,)
        self._held[stage] += kind is UnitKind.forward and not self._rules.forward_only
        following = chunk + (1 if kind is UnitKind.forward else -1)
        return (stage, self._stage_of(following)) if 0 <= following <= self._last else (stage,)

    def _choose(self, stage: int) -> _Choice | None:
        """Return what the rank would run next; None while nothing has arrived or is deferred."""
        free = self._free[stage]
        ready = [*self._list_forward(stage, free), *self._list_backward(stage, free)]
        put_off = [
            (len(self._weight_backward[chunk]), -chunk)
            for chunk in (self._last - stage, stage)
            if len(self._weight_backward[chunk]) < len(self._input_backward[chunk])
        ]
        choice = min(ready)[-1] if ready else None
        if not put_off:
            return choice
        chunk = -min(put_off)[1]
        if choice is not None and choice.start - free <= self._rules.gap * self._rules.times[chunk].weight_backward:
            return choice
        return _Choice(free, stage, chunk, UnitKind.weight_backward)

    def _list_forward(self, stage: int, free: float) -> list[tuple[float, int, int, _Choice]]:
        found = []
        for chunk in (stage, self._last - stage):
            reserve = self._rules.reserve if chunk == stage else 0
            micro_batch = len(self._forward[chunk])
            if micro_batch == self._rules.num_micro_batches or (
                self._rules.limit is not None and self._held[stage] >= self._rules.limit - reserve
            ):
                continue
            came = self._forward[chunk - 1] if chunk else None
            if came is None or micro_batch < len(came):
                start = max(came[micro_batch], free) if came is not None else free
                found.append((start, 1, -chunk, _Choice(start, stage, chunk, UnitKind.forward)))
        return found

    def _list_backward(self, stage: int, free: float) -> list[tuple[float, int, int, _Choice]]:
        found = []
        for chunk in () if self._rules.forward_only else (stage, self._last - stage):
            micro_batch = len(self._input_backward[chunk])
            if micro_batch == len(self._forward[chunk]):
                continue
            came = self._forward[chunk] if chunk == self._last else self._input_backward[chunk + 1]
            if micro_batch < len(came):
                start = max(came[micro_batch], free)
                preferred = start - self._rules.preference * self._rules.times[chunk].forward
                found.append((preferred, 0, chunk, _Choice(start, stage, chunk, UnitKind.input_backward)))
        return found

    def _stage_of(self, chunk: int) -> int:
        return min(chunk, self._last - chunk)
