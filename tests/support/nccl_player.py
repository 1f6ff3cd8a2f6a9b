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
- The kernel goes through them in batches, the next one when all of a batch have met theirs (`addWorkBatchToPlan`). A
  batch has at most one send to a rank and one receive from it, and these of eight consecutive rounds. A round is a
  distance between ranks, so that all send and receive in the same order. That a GPU has channels, each with batches of
  its own, helps where two messages use different ones; here there is one.
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
from functools import cache
from itertools import groupby
from random import Random
from typing import Any

from support.rank_programs import PASSES, HostMessage, Kernel, Program, Wait

_ROUNDS_A_BATCH = 8  # NCCL_MAX_DEV_WORK_P2P_PER_BATCH


def play(
    programs: Sequence[Program],
    *,
    blocking: bool = False,
    barriers: float = 0.0,
    seed: int = 0,
    gpus_per_node: int | None = None,
) -> list[int]:
    """Return how many calls each rank could not make, because ranks wait for each other. barriers: the share of calls
    before which the host waits for its device. gpus_per_node: of a pipeline's ranks; None: all."""
    return _Player(programs, blocking, barriers, Random(seed), gpus_per_node).play()


@cache
def list_rounds(num_ranks: int, num_local: int) -> dict[tuple[int, int], int]:
    """Return the number of each round, by (nodes, ranks of a node) from the sender to the receiver (NCCL's
    `ncclP2pSchedule`: distances 0, 1, 3, 6, 10, ... modulo a power of two)."""
    distances = [
        (one, other) for one in _list_distances(num_ranks // num_local) for other in _list_distances(num_local)
    ]
    return {distance: number for number, distance in enumerate(distances)}


def _list_distances(size: int) -> list[int]:
    power = 1 << (size - 1).bit_length()
    return [distance for step in range(power) if (distance := step * (step + 1) // 2 % power) < size]


def split_into_batches(
    kernel: Kernel, rank: int, ring: Sequence[int], num_local: int
) -> dict[tuple[bool, int, int], int]:
    """Return the batch of each message of a group, by (whether it is sent, the other rank, its number among those)."""
    rounds = list_rounds(len(ring), num_local)

    def find_round(sender: int, receiver: int) -> int:
        one, other = divmod(ring.index(sender), num_local), divmod(ring.index(receiver), num_local)
        return rounds[(other[0] - one[0]) % (len(ring) // num_local), (other[1] - one[1]) % num_local]

    order = []
    for is_send, peers in ((True, kernel.sends), (False, kernel.receives)):
        for place, peer in enumerate(peers):
            number = peers[:place].count(peer)
            order.append((number, find_round(*((rank, peer) if is_send else (peer, rank))), (is_send, peer, number)))
    batches, batch, held = {}, 0, set()
    for turn, turn_messages in groupby(sorted(order), key=lambda each: each[:2]):
        number = turn[1]
        if any(number == other or number // _ROUNDS_A_BATCH != other // _ROUNDS_A_BATCH for other in held):
            batch, held = batch + 1, set()
        held.add(number)
        batches.update({message: batch for _, _, message in turn_messages})
    return batches


@dataclass(eq=False)
class _Launched:
    """A kernel in its stream. after: what it comes after. open: its sends and receives, as (is sent, from, to, number),
    that have not met their counterparts, and the batch of each."""

    kernel: Kernel
    after: list[_Launched]
    open: dict[tuple[bool, int, int, int], int] = field(default_factory=dict)
    number: int = 0  # of a collective, on its communicator
    is_done: bool = False

    def list_offered(self) -> list[tuple[bool, int, int, int]]:
        """Its messages that can meet their counterparts."""
        batch = min(self.open.values(), default=0)
        return [message for message, other in self.open.items() if other == batch]


class _Player:
    def __init__(
        self,
        programs: Sequence[Program],
        blocking: bool,
        barriers: float,
        random: Random,
        gpus_per_node: int | None,
    ) -> None:
        self.programs, self.blocking, self.random, self.gpus_per_node = programs, blocking, random, gpus_per_node
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
        ring = kernel.ring or range(len(self.programs))
        batches = split_into_batches(kernel, rank, ring, self.gpus_per_node or len(ring))
        for (is_send, peer, _), batch in sorted(batches.items()):
            pair = (rank, peer) if is_send else (peer, rank)
            launched.open[is_send, *pair, self.count(is_send, *pair)] = batch
        launched.number = self.count(rank, kernel.stream)
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
        offered = {one for streams in running for launched in streams.values() for one in launched.list_offered()}
        ended = False
        for own in running:
            for name, launched in own.items():
                met = [one for one in launched.list_offered() if (not one[0], *one[1:]) in offered]
                for one in met:
                    del launched.open[one]
                ended = ended or bool(met)
                meets = (running[peer].get(name) for peer in launched.kernel.meets)
                if not launched.open and all(other and other.number == launched.number for other in meets):
                    launched.is_done = ended = True
        for streams in self.streams:
            for name in streams:
                streams[name] = [launched for launched in streams[name] if not launched.is_done]
        return ended
