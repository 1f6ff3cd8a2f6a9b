"""A model of NCCL, which no test can run: does a schedule end, whatever the device does?

The programs of all ranks (`support/rank_programs.py`) are played at once, with what NCCL and CUDA guarantee and no
more:

- A launch puts a kernel at the end of its stream, after all that the stream of passes holds by then. Each communicator
  has a stream of its own; kernels of one stream run one after the other.
- A group of sends and receives is one kernel. The n-th group in which a rank has messages with another one meets the
  other's n-th group with the first, when both run at the same time and have the same messages between them. Groups that
  differ never meet: NCCL goes through a group in an order of its own, which differs between releases, so nothing is
  assumed of it. A group ends when it has met that of every rank that it has messages with.
- A collective runs until all its ranks run it.
- `blocking`: the host waits after each launch until the kernel is done (CUDA_LAUNCH_BLOCKING=1). `barriers`: before a
  call, at random, it waits until all kernels of its device are done, as it does at the first use of a kernel, or when
  memory is freed to CUDA.
- Messages between hosts (gloo) block both ends.

Connections are opened before the first step (`Transfers`), so a group never waits for one here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from support.rank_programs import PASSES, HostMessage, Kernel, Program, Wait


def play(programs: Sequence[Program], *, blocking: bool = False, barriers: float = 0.0, seed: int = 0) -> list[int]:
    """Return how many calls each rank could not make, because ranks wait for each other. barriers: the share of calls
    before which the host waits for its device."""
    return _Player(programs, blocking, barriers, Random(seed)).play()


@dataclass(eq=False)
class _Launched:
    """A kernel in its stream."""

    kernel: Kernel
    after: list[_Launched]  # kernels of this rank that it starts after
    open: dict[int, int]  # other rank -> number among the groups with messages between the two; those not met
    number: int  # of a collective, on its communicator
    is_done: bool = False

    def count_messages(self, peer: int) -> tuple[int, int]:
        """Return how many messages are sent to a rank, and received from it."""
        return self.kernel.sends.count(peer), self.kernel.receives.count(peer)


@dataclass
class _Player:
    programs: Sequence[Program]
    blocking: bool
    barriers: float
    random: Random
    counts: Counter[Any] = field(default_factory=Counter)
    host: Counter[tuple[int, int]] = field(default_factory=Counter)  # messages on their way

    def __post_init__(self) -> None:
        self.stops = [[self.random.random() < self.barriers for _ in program] for program in self.programs]
        self.calls = [0 for _ in self.programs]
        self.streams: list[dict[str, list[_Launched]]] = [{} for _ in self.programs]  # what is not done
        self.awaited: list[list[_Launched]] = [[] for _ in self.programs]  # by the next pass
        self.launched: list[dict[Kernel, _Launched]] = [{} for _ in self.programs]

    def play(self) -> list[int]:
        moved = True
        while moved:
            moved = False
            for rank in self.random.sample(range(len(self.programs)), len(self.programs)):
                while self.calls[rank] < len(self.programs[rank]) and self.makes_call(rank):
                    self.calls[rank] += 1
                    moved = True
            while self.runs_kernels():
                moved = True
        left = [len(program) - made for program, made in zip(self.programs, self.calls)]
        return [calls + sum(map(len, streams.values())) for calls, streams in zip(left, self.streams)]

    def makes_call(self, rank: int) -> bool:
        """Returns False where the host has to wait."""
        pending = any(self.streams[rank].values())
        if pending and (self.blocking or self.stops[rank][self.calls[rank]]):
            return False
        call = self.programs[rank][self.calls[rank]]
        if isinstance(call, HostMessage):
            return self.passes_message(rank, call)
        if isinstance(call, Wait):
            self.awaited[rank].append(self.launched[rank][call.kernel])
        else:
            self.launch(rank, call)
        return True

    def passes_message(self, rank: int, call: HostMessage) -> bool:
        """A sender goes on, and the receiver waits for it."""
        if call.sends:
            self.host[rank, call.peer] += 1
            return True
        if not self.host[call.peer, rank]:
            return False
        self.host[call.peer, rank] -= 1
        return True

    def launch(self, rank: int, kernel: Kernel) -> None:
        own = self.streams[rank].setdefault(kernel.stream, [])
        after = own[-1:] + self.streams[rank].get(PASSES, [])[-1:] + self.awaited[rank]
        if kernel.stream == PASSES:
            self.awaited[rank] = []
        peers = dict.fromkeys([*kernel.sends, *kernel.receives])
        numbers = {peer: self.count(kernel.stream, rank, peer) for peer in peers}
        launched = _Launched(kernel, after, numbers, self.count(rank, kernel.stream))
        own.append(launched)
        self.launched[rank][kernel] = launched

    def count(self, *name: Any) -> int:
        self.counts[name] += 1
        return self.counts[name]

    def runs_kernels(self) -> bool:
        """Let every kernel that can run meet its counterparts; returns whether any did."""
        running = [
            {
                name: stream[0]
                for name, stream in streams.items()
                if stream and all(one.is_done for one in stream[0].after)
            }
            for streams in self.streams
        ]
        pairs = [(rank, name, launched) for rank, own in enumerate(running) for name, launched in own.items()]
        met = [
            (launched, peer)
            for rank, name, launched in pairs
            for peer in launched.open
            if self.meets(launched, rank, running[peer].get(name), peer)
        ]
        for launched, peer in met:
            del launched.open[peer]
        ended = False
        for _, name, launched in pairs:
            others = (running[peer].get(name) for peer in launched.kernel.meets)
            if not launched.open and all(other and other.number == launched.number for other in others):
                launched.is_done = ended = True
        for streams in self.streams:
            for name in streams:
                streams[name] = [launched for launched in streams[name] if not launched.is_done]
        return ended or bool(met)

    def meets(self, launched: _Launched, rank: int, other: _Launched | None, peer: int) -> bool:
        if other is None or other.open.get(rank) != launched.open[peer]:
            return False
        return launched.count_messages(peer) == other.count_messages(rank)[::-1]
