"""A model of NCCL, which no test can run: does a schedule end, whatever the device does?

Each rank's program is recorded from the real `Runner`, `Transfers` and `GradientSums`, with stand-ins for the module,
DeepSpeed's optimizer and `torch.distributed`. Then all programs are played at once, with what NCCL and CUDA guarantee
and no more:

- A launch puts a kernel at the end of its stream, after all that the stream of passes holds by then. Each communicator
  has a stream of its own; kernels of one stream run one after the other.
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from training.engine import gradient_sums
from training.engine.gradient_sums import GradientSums, list_backward
from training.engine.runner import Runner, StageWithLoss
from training.pipeline import transfers
from training.pipeline.schedule import Schedule
from training.pipeline.transfers import Transfers
from training.pipeline.weight_gradients import DeferredGradients

PASSES = "passes"  # the stream of a rank's own kernels


@dataclass(eq=False)
class Kernel:
    """stream: a communicator, or PASSES. sends, receives: the other ranks, of a group. meets: the ranks of a
    collective."""

    stream: str
    sends: Sequence[int] = ()
    receives: Sequence[int] = ()
    meets: Sequence[int] = ()


@dataclass(eq=False)
class Wait:
    """The stream of passes waits for a kernel."""

    kernel: Kernel


@dataclass(eq=False)
class HostMessage:
    """Between the hosts of two ranks."""

    sends: bool
    peer: int


Program = list[Any]  # of one rank: kernels that are launched, waits and messages of hosts


def record(
    schedule: Schedule,
    num_evaluated: int = 0,
    num_replicas: int = 1,
    *,
    meets_in_passes: bool = False,
    zero_stage: int = 1,
) -> list[Program]:
    """Return the programs of all ranks, replica by replica: one step; with `num_evaluated`, an evaluation of so many
    micro-batches instead. Replicas reduce gradients as at `zero_stage` 1 or 2. meets_in_passes: and meet in each pass,
    as ranks do that share weights (stage 3), sequences (ring, all-to-all) or layers."""
    programs = []
    for replica in range(num_replicas):
        for stage in range(schedule.num_stages):
            replicas = [schedule.num_stages * each + stage for each in range(num_replicas)]
            base = schedule.num_stages * replica
            ring = [base + each for each in range(schedule.num_stages)]
            rank = _Rank(stage, ring, replicas, meets_in_passes, zero_stage)
            programs.append(rank.record(schedule, num_evaluated))
    return programs


@dataclass
class _Rank:
    """A rank that is recorded. ring, replicas: the ranks of its pipeline and those with the same layers."""

    stage: int
    ring: list[int]
    replicas: list[int]
    meets_in_passes: bool
    zero_stage: int
    program: Program = field(default_factory=list)

    def record(self, schedule: Schedule, num_evaluated: int) -> Program:
        module: Any = _Module(self.stage, schedule.list_chunks(self.stage), self.run_pass)
        number = self.replicas.index(self.ring[self.stage])
        with pytest.MonkeyPatch.context() as patch:
            distributed = _Distributed(self.program, self.replicas, number)
            patch.setattr(transfers, "dist", distributed)
            patch.setattr(gradient_sums, "dist", distributed)
            patch.setattr(transfers, "make_host_group", lambda: None)
            links = Transfers(schedule, [self.ring], self.ring[self.stage], torch.device("cpu"))
            gradients = self.build_sums(module, schedule, number)
            runner = Runner(module, StageWithLoss(module), schedule, links, gradients, lambda: None)
            del self.program[:]  # of connecting
            batches = iter([((torch.zeros(1),), None)] * (num_evaluated or schedule.num_micro_batches))
            if num_evaluated:
                runner.evaluate(batches, num_evaluated)
            else:
                runner.train(batches)
        return self.program

    def run_pass(self) -> None:
        self.program.append(Kernel(PASSES))
        if self.meets_in_passes and len(self.replicas) > 1:
            self.program.append(Kernel("layers", meets=self.replicas))
            self.program.append(Wait(self.program[-1]))

    def build_sums(self, module: Any, schedule: Schedule, number: int) -> GradientSums:
        parameters = list(module.parameters())
        size = -(-len(parameters) // len(self.replicas))
        optimizer = SimpleNamespace(
            bit16_groups=[parameters], partition_size=[size], reduce_bucket_size=1, cpu_offload=False,
            params_in_partition=[parameters[size * number : size * (number + 1)]], averaged_gradients={},
            dp_process_group="replicas", _grad_acc_hooks=[], check_grad_overflow=True, check_overflow=None,
            scaled_global_norm=None, scale_if_loss=lambda loss: loss,
        )  # fmt: skip
        passes = list_backward(schedule.list_units(self.stage))
        return GradientSums(module, optimizer, passes, shards=self.zero_stage == 2, reduce_dtype=torch.float32)


class _Module(torch.nn.Module):
    """A stage whose passes record themselves, with a weight in each chunk."""

    parallel = SimpleNamespace(rank=0)

    def __init__(self, stage_id: int, chunks: Sequence[int], run_pass: Callable[[], None]) -> None:
        super().__init__()
        self.stage_id, self.chunk_numbers, self._run_pass = stage_id, chunks, run_pass
        self.deferred, self._active = DeferredGradients(), 0
        self.layers = torch.nn.ModuleList(_Layer(run_pass) for _ in chunks)

    def forward(self, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layers[self._active](inputs[0]), torch.zeros(1, dtype=torch.int32)

    def loss_fn(self, outputs: tuple[torch.Tensor, ...], labels: Any) -> torch.Tensor:
        return outputs[0].sum()

    def set_active_chunk(self, chunk: int) -> None:
        self._active = chunk

    def list_modules(self, chunk: int) -> list[torch.nn.Module]:
        return [self.layers[self.chunk_numbers.index(chunk)]]

    def get_tied_weights_and_groups(self) -> list[Any]:
        return []


class _Layer(torch.nn.Module):
    """y = x + w; both passes record themselves."""

    def __init__(self, run_pass: Callable[[], None]) -> None:
        super().__init__()
        self.weight, self._run_pass = torch.nn.Parameter(torch.zeros(1)), run_pass

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._run_pass()
        y = x + self.weight
        if y.requires_grad:
            y.register_hook(lambda _: self._run_pass())
        return y


class _Distributed:
    """`torch.distributed` as `Transfers` uses it."""

    Work = Any
    isend, irecv = "isend", "irecv"

    def __init__(self, program: Program, replicas: Sequence[int], number: int) -> None:
        self._program, self._replicas, self._number = program, replicas, number

    def get_rank(self, group: str) -> int:
        return self._number

    def get_world_size(self, group: str) -> int:
        return len(self._replicas)

    def reduce(self, tensor: torch.Tensor, group: str, group_dst: int, async_op: bool) -> Any:
        return self._launch(Kernel(group, meets=self._replicas))

    def _launch(self, kernel: Kernel) -> Any:
        self._program.append(kernel)
        return SimpleNamespace(wait=lambda: self._program.append(Wait(kernel)), is_completed=lambda: False)

    def new_subgroups_by_enumeration(self, rings: Any, pg_options: Any) -> tuple[str, None]:
        return "pipeline", None

    def get_backend(self) -> str:
        return "model"

    def all_reduce(self, tensor: torch.Tensor, group: str) -> None: ...

    def P2POp(self, kind: str, tensor: torch.Tensor, peer: int, group: str) -> tuple[str, int]:
        return kind, peer

    def batch_isend_irecv(self, operations: Sequence[tuple[str, int]]) -> list[Any]:
        sends, receives = ([peer for kind, peer in operations if kind == one] for one in ("isend", "irecv"))
        return [self._launch(Kernel("pipeline", sends, receives))]

    def send_object_list(self, shapes: Any, peer: int, group: None) -> None:
        self._program.append(HostMessage(True, peer))

    def recv_object_list(self, received: list[Any], peer: int, group: None) -> None:
        self._program.append(HostMessage(False, peer))
        received[0] = [(torch.Size([1]), torch.float32), (torch.Size([1]), torch.int32)]


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
        """False where the host has to wait."""
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
