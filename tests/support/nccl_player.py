"""A model of NCCL, which no test can run: does a schedule end, whatever the device does?

The programs of all ranks (`support/rank_programs.py`) are played at once, with what NCCL and CUDA guarantee and no
more:

- A launch puts a kernel at the end of its stream, after all that the stream of passes holds by then. Each communicator
  has a stream of its own; kernels of one stream run one after the other.
- Two ranks connect for messages in one direction when both first launch a group that has one, and only then is either
  group's kernel launched; the hosts wait for that (NCCL's `p2pTaskAppend` and `ncclTransportP2pSetup`). So do those of
  the ranks of a communicator's first collective.
- A group of sends and receives is one kernel. It runs until each of them has met its counterpart in a kernel that runs
  at the same time. The n-th send from one rank to another meets the n-th receive. Nothing is buffered.
- A collective runs until all its ranks run it.
- `blocking`: the host waits after each launch until the kernel is done (CUDA_LAUNCH_BLOCKING=1). `barriers`: before a
  call, at random, it waits until all kernels of its device are done, as it does at the first use of a kernel, or when
  memory is freed to CUDA.
- Messages between hosts (gloo) block both ends.
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
    """A kernel in its stream. after: what it comes after. open: its sends and receives, by (from, to, number), that
    have not met their counterparts."""

    kernel: Kernel
    after: list[_Launched]
    open: set[tuple[bool, int, int, int]] = field(default_factory=set)
    number: int = 0  # of a collective, on its communicator
    is_done: bool = False


class _Player:
    def __init__(self, programs: Sequence[Program], blocking: bool, barriers: float, random: Random) -> None:
        self.programs, self.blocking, self.random = programs, blocking, random
        self.stops = [[random.random() < barriers for _ in program] for program in programs]
        ranks = range(len(programs))
        self.calls = [0 for _ in ranks]
        self.streams: list[dict[str, list[_Launched]]] = [{} for _ in ranks]  # what is not done
        self.awaited: list[list[_Launched]] = [[] for _ in ranks]  # by the next pass
        self.launched: list[dict[Kernel, _Launched]] = [{} for _ in ranks]
        self.counts: Counter[Any] = Counter()
        self.host: Counter[tuple[int, int]] = Counter()  # messages on their way
        # Ends of connections: (rank, stream, from, to), and (rank, stream, -1, -1) of a communicator
        self.connecting: set[tuple[int, str, int, int]] = set()

    def play(self) -> list[int]:
        moved = True
        while moved:
            moved, connecting = False, len(self.connecting)
            for rank in self.random.sample(range(len(self.programs)), len(self.programs)):
                while self.calls[rank] < len(self.programs[rank]) and self.makes_call(rank):
                    self.calls[rank] += 1
                    moved = True
            while self.runs_kernels():
                moved = True
            moved = moved or len(self.connecting) > connecting
        left = [len(program) - made for program, made in zip(self.programs, self.calls)]
        return [calls + sum(map(len, streams.values())) for calls, streams in zip(left, self.streams)]

    def makes_call(self, rank: int) -> bool:
        """False where the host has to wait."""
        pending = any(self.streams[rank].values())
        if pending and (self.blocking or self.stops[rank][self.calls[rank]]):
            return False
        call = self.programs[rank][self.calls[rank]]
        if isinstance(call, HostMessage):
            return self.passes_message(rank, call)
        if isinstance(call, Wait):
            self.awaited[rank].append(self.launched[rank][call.kernel])
        elif self.connects(rank, call):
            self.launch(rank, call)
        else:
            return False
        return True

    def connects(self, rank: int, kernel: Kernel) -> bool:
        """False where another rank that a first use connects with has not come as far."""
        ends = [(peer, (kernel.stream, rank, peer)) for peer in kernel.sends]
        ends += [(peer, (kernel.stream, peer, rank)) for peer in kernel.receives]
        ends += [(peer, (kernel.stream, -1, -1)) for peer in kernel.meets]
        self.connecting.update((rank, *direction) for _, direction in ends)
        return all((peer, *direction) in self.connecting for peer, direction in ends)

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
        after = own[-1:] + self.streams[rank].get(PASSES, [])[-1:]
        if kernel.stream == PASSES:
            after, self.awaited[rank] = after + self.awaited[rank], []
        else:
            after = after + self.awaited[rank]
        launched = _Launched(kernel, after)
        for peers, is_send in ((kernel.sends, True), (kernel.receives, False)):
            for peer in peers:
                pair = (rank, peer) if is_send else (peer, rank)
                launched.open.add((is_send, *pair, self.count(is_send, *pair)))
        launched.number = self.count(rank, kernel.stream)
        own.append(launched)
        self.launched[rank][kernel] = launched

    def count(self, *name: Any) -> int:
        self.counts[name] += 1
        return self.counts[name]

    def runs_kernels(self) -> bool:
        """Let every kernel that can run meet its counterparts; returns whether any ended."""
        running = [
            {
                name: stream[0]
                for name, stream in streams.items()
                if stream and all(one.is_done for one in stream[0].after)
            }
            for streams in self.streams
        ]
        offered = {one for streams in running for launched in streams.values() for one in launched.open}
        ended = False
        for own in running:
            for name, launched in own.items():
                launched.open = {one for one in launched.open if (not one[0], *one[1:]) not in offered}
                meets = (running[peer].get(name) for peer in launched.kernel.meets)
                if not launched.open and all(other and other.number == launched.number for other in meets):
                    launched.is_done = ended = True
        for streams in self.streams:
            for name in streams:
                streams[name] = [launched for launched in streams[name] if not launched.is_done]
        return ended
