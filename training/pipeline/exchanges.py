"""Plans what each rank sends and receives between two of its passes, so that no rank can wait forever. Pure.

NCCL's transfers are kernels. One that waits for its peer can hold up all that its rank does next: with launches that
block, or whenever CUDA waits for the whole device (the first use of a kernel, `cudaMalloc`, `cudaFree`). So it is not
enough that messages are sent and received in matching orders; a rank must be able to wait between any two passes until
all that it has launched is done.

That is what is planned here. All ranks are stepped through their passes, and a rank stays between two of them until
what it sends has been received, and what its next pass needs has come. While it stays, it also receives what others
have for it, though a later pass needs it: else two ranks that both send would wait for each other. The run then goes
through the same messages, and those that wait for each other are those that met here, in the order in which they met.

What a rank sends and receives at one moment of such a stay is one `Exchange`, launched together. For its peers it is
the same moment, so two ranks have the same messages between them in it, at most one in each direction. It must not hold
more: NCCL promises nothing for two groups that do not match. On a GPU it went through such a group in batches, of which
none holds two operations in one direction between the same ranks, and started the next when all of one had arrived, so
that what was sent now waited for what arrived later.

P stages, V chunks per stage, M micro-batches.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from training.pipeline.schedule import Schedule, Unit, UnitKind


class Message(NamedTuple):
    """The input of a pass through `chunk`: activations of the chunk before it, or a gradient of the one after it."""

    is_gradient: bool
    chunk: int
    micro_batch: int


class Exchange(NamedTuple):
    """A message that a rank sends to another one, and those that it receives, in the order of sending where two come
    from one rank."""

    sent: Message | None = None
    received: tuple[Message, ...] = ()


Exchanges = tuple[Exchange, ...]


def find_input(schedule: Schedule, unit: Unit) -> Message | None:
    """Return what a pass needs of another; None for a first forward, a last backward, or a weight pass."""
    is_gradient = unit.kind is not UnitKind.forward
    is_first = unit.chunk == (schedule.last_chunk if is_gradient else 0)
    return None if is_first or unit.kind is UnitKind.weight_backward else Message(is_gradient, *unit[:2])


def find_output(schedule: Schedule, unit: Unit) -> Message | None:
    """Return what a pass makes for another; None for a last forward, a first backward, or a weight pass."""
    is_gradient = unit.kind is not UnitKind.forward
    is_last = unit.chunk == (0 if is_gradient else schedule.last_chunk)
    chunk = unit.chunk - 1 if is_gradient else unit.chunk + 1
    return None if is_last or unit.kind is UnitKind.weight_backward else Message(is_gradient, chunk, unit.micro_batch)


def find_sender(schedule: Schedule, message: Message) -> int:
    """Return the stage that a message comes from."""
    return schedule.find_stage(message.chunk + (1 if message.is_gradient else -1))


def is_local(schedule: Schedule, message: Message) -> bool:
    """Returns whether a rank makes the message for itself."""
    return find_sender(schedule, message) == schedule.find_stage(message.chunk)


@cache
def plan_exchanges(schedule: Schedule, forward_only: bool = False) -> tuple[tuple[Exchanges, ...], ...]:
    """Return the exchanges of each rank: those before its first pass and those after each. forward_only: for an
    evaluation."""
    stages = range(schedule.num_stages)
    planned = [_Rank(schedule, stage, forward_only) for stage in stages]
    ends: list[tuple[float, int]] = [(0, stage) for stage in stages]  # of passes, in the order of time
    while ends:
        now = ends[0][0]
        while ends and ends[0][0] == now:
            planned[heapq.heappop(ends)[1]].finish_pass()
        for sender in planned:
            sender.hand_over(planned, now)
        for rank in planned:
            if rank.can_go_on():
                heapq.heappush(ends, (now + rank.start_pass(), rank.stage_id))
    assert all(rank.is_done for rank in planned), f"ranks wait for each other: {schedule}"
    return tuple(tuple(map(tuple, rank.exchanges)) for rank in planned)


class _Rank:
    """A rank that is stepped through its passes. offered: what it sends in its present stay, until it is received."""

    def __init__(self, schedule: Schedule, stage_id: int, forward_only: bool) -> None:
        self._schedule, self.stage_id = schedule, stage_id
        units = schedule.list_forward(stage_id) if forward_only else schedule.list_units(stage_id)
        self._remaining = list(reversed(units))
        self._running: Unit | None = None
        self._arrived: set[Message] = set()
        self._offered: Message | None = None
        self._stays = False
        self.exchanges: list[list[Exchange]] = []  # of each stay
        self._met_at: float | None = None  # those of the last one

    @property
    def is_done(self) -> bool:
        return not self._remaining and self._offered is None

    def finish_pass(self) -> None:
        sent = None if self._running is None else find_output(self._schedule, self._running)
        if sent is not None and is_local(self._schedule, sent):
            sent = None
        self.exchanges.append([])
        self._running, self._offered, self._stays, self._met_at = None, sent, True, None

    def hand_over(self, ranks: list[_Rank], now: float) -> None:
        """Send what is offered, where its receiver stays between two passes too."""
        receiver = None if self._offered is None else ranks[self._schedule.find_stage(self._offered.chunk)]
        if receiver is not None and receiver._stays:
            assert self._offered is not None
            self._extend(now, lambda exchange: Exchange(self._offered, exchange.received))
            receiver._receive(self._offered, now)
            self._offered = None

    def _receive(self, message: Message, now: float) -> None:
        self._arrived.add(message)
        self._extend(now, lambda exchange: Exchange(exchange.sent, (*exchange.received, message)))

    def _extend(self, now: float, extend: Callable[[Exchange], Exchange]) -> None:
        """Extend the exchange of this moment."""
        if self._met_at != now:
            self.exchanges[-1].append(Exchange())
        self._met_at = now
        self.exchanges[-1][-1] = extend(self.exchanges[-1][-1])

    def can_go_on(self) -> bool:
        if not self._stays or self._offered is not None or not self._remaining:
            return False
        needed = find_input(self._schedule, self._remaining[-1])
        return needed is None or is_local(self._schedule, needed) or needed in self._arrived

    def start_pass(self) -> float:
        """Returns how long the next pass takes: at least 1, so that what follows it is another moment."""
        self._running, self._stays = self._remaining.pop(), False
        return max(1, self._schedule.times[self._running.chunk].find(self._running.kind))
