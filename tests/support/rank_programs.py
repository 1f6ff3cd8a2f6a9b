"""The programs of a schedule's ranks, recorded from the real `Runner`, `Transfers` and `GradientSums`.

Stand-ins take the place of the module, DeepSpeed's optimizer and `torch.distributed`; no process is started. What a
program means on a device is in `support/nccl_player.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from batch import Batch, Inputs, Targets
from training.engine import gradient_sums
from training.engine.gradient_sums import GradientSums, list_backward
from training.engine.reduce_buckets import reduces_in_passes as should_reduce
from training.engine.runner import Runner, StageWithLoss
from training.pipeline import transfers
from training.pipeline.schedule import Schedule
from training.pipeline.transfers import Transfers
from training.pipeline.weight_gradients import DeferredGradients

PASSES = "passes"  # the stream of a rank's own kernels
REPLICAS, EXPERTS, SAME_EXPERTS = "replicas", "experts", "same experts"  # communicators
LAYERS = 2  # of a chunk: gradients of the second are reduced before the first one's pass


@dataclass(eq=False)
class Kernel:
    """A kernel of a rank: of its own passes, a group of messages, or a collective."""

    stream: str  # a communicator, or PASSES
    sends: Sequence[int] = ()  # the receiver of each message that a group sends
    receives: Sequence[int] = ()  # the sender of each message that a group receives
    meets: Sequence[int] = ()  # the ranks of a collective


@dataclass(eq=False)
class Wait:
    """The stream of passes waits for a kernel."""

    kernel: Kernel


@dataclass(eq=False)
class HostMessage:
    """Between the hosts of two ranks."""

    sends: bool
    peer: int


Program = list[Any]  # of one rank: its kernels, waits and messages of hosts, in the order of its calls


def record(
    schedule: Schedule,
    num_evaluated: int = 0,
    num_replicas: int = 1,
    *,
    meets_in_passes: bool = False,
    zero_stage: int = 1,
    expert_parallel_size: int = 1,
    reduces_in_passes: bool | None = None,
    without_experts: Collection[int] = (),
) -> list[Program]:
    """Return the programs of all ranks, replica by replica, of one step or of an evaluation.

    num_evaluated: the number of micro-batches of an evaluation; 0 for a step. meets_in_passes: replicas meet in each
    pass, as ranks do that share weights (stage 3), sequences (ring, all-to-all) or layers. zero_stage: how replicas
    reduce gradients, 1 or 2. expert_parallel_size: the number of replicas that divide experts, meet in each pass, and
    reduce the gradients of experts with the replicas that have the same ones. reduces_in_passes: in place of what the
    engine chooses. without_experts: ranks whose experts get no token, and so no gradient.
    """
    programs = []
    for replica in range(num_replicas):
        for stage in range(schedule.num_stages):
            replicas = [schedule.num_stages * each + stage for each in range(num_replicas)]
            base = schedule.num_stages * replica
            ring = [base + each for each in range(schedule.num_stages)]
            layout: Any = SimpleNamespace(
                topology=SimpleNamespace(num_expert_shares=expert_parallel_size), context_parallel_size=1
            )
            if reduces_in_passes is None:
                reduces_in_passes = should_reduce(layout, expert_parallel_size > 1)
            rank = _Rank(
                stage, ring, replicas, meets_in_passes, zero_stage, expert_parallel_size, reduces_in_passes,
                has_tokens=ring[stage] not in without_experts,
            )  # fmt: skip
            programs.append(rank.record(schedule, num_evaluated))
    return programs


@dataclass
class _Rank:
    """A rank that is recorded. ring, replicas: the ranks of its pipeline and those with the same layers; num_shares of
    these divide experts."""

    stage: int
    ring: list[int]
    replicas: list[int]
    meets_in_passes: bool
    zero_stage: int
    num_shares: int
    reduces_in_passes: bool
    has_tokens: bool
    program: Program = field(default_factory=list)

    @property
    def groups(self) -> dict[str, list[int]]:
        number = self.replicas.index(self.ring[self.stage])
        first = number - number % self.num_shares
        return {
            REPLICAS: self.replicas,
            EXPERTS: self.replicas[first : first + self.num_shares],
            SAME_EXPERTS: self.replicas[number % self.num_shares :: self.num_shares],
        }

    def record(self, schedule: Schedule, num_evaluated: int) -> Program:
        module: Any = _Module(
            self.stage, schedule.list_chunks(self.stage), self.run_pass, self.num_shares > 1, self.has_tokens
        )
        with pytest.MonkeyPatch.context() as patch:
            distributed = _Distributed(self.program, self.groups, self.ring[self.stage])
            patch.setattr(transfers, "dist", distributed)
            patch.setattr(gradient_sums, "dist", distributed)
            patch.setattr(transfers, "make_host_group", lambda: None)
            links = Transfers(schedule, [self.ring], self.ring[self.stage], torch.device("cpu"))
            gradients = self.build_sums(module, schedule, distributed)
            runner = Runner(module, StageWithLoss(module), schedule, links, gradients, lambda: None)
            empty = torch.zeros(1)
            batch = Batch(Inputs(empty, empty, empty), Targets.find(empty, empty))
            batches = iter([batch] * (num_evaluated or schedule.num_micro_batches))
            if num_evaluated:
                with torch.no_grad():
                    runner.run(runner.start_evaluation(num_evaluated), batches)
            else:
                runner.run(runner.start_step(), batches)
                runner.update()
        return self.program

    def run_pass(self) -> None:
        self.program.append(Kernel(PASSES))
        if self.meets_in_passes and len(self.replicas) > 1:
            self._meet("layers", self.replicas)
        if self.num_shares > 1:
            self._meet(EXPERTS, self.groups[EXPERTS])

    def _meet(self, stream: str, ranks: Sequence[int]) -> None:
        self.program.append(Kernel(stream, meets=ranks))
        self.program.append(Wait(self.program[-1]))

    def build_sums(self, module: Any, schedule: Schedule, distributed: _Distributed) -> GradientSums:
        named = list(module.named_parameters())
        groups = [[each for name, each in named if "expert" not in name]]
        groups += [[each for name, each in named if "expert" in name]] if self.num_shares > 1 else []
        partitioned_over = [REPLICAS, SAME_EXPERTS][: len(groups)]
        sizes = [-(-len(group) // distributed.get_world_size(over)) for group, over in zip(groups, partitioned_over)]
        starts = [size * distributed.get_rank(over) for size, over in zip(sizes, partitioned_over)]
        optimizer = SimpleNamespace(
            bit16_groups=groups, partition_size=sizes, reduce_bucket_size=1, cpu_offload=False,
            params_in_partition=[each[start : start + size] for each, start, size in zip(groups, starts, sizes)],
            averaged_gradients={}, dp_process_group=REPLICAS, real_dp_process_group=partitioned_over,
            _grad_acc_hooks=[], check_grad_overflow=True, check_overflow=None, scaled_global_norm=None,
            scale_if_loss=lambda loss: loss,
        )  # fmt: skip
        passes = list_backward(schedule.list_units(self.stage))
        return GradientSums(
            module, optimizer, passes, shards=self.zero_stage == 2, reduce_dtype=torch.float32,
            reduces_in_passes=self.reduces_in_passes,
        )  # fmt: skip


class _Module(torch.nn.Module):
    """A stage whose passes record themselves, with a weight in each layer."""

    ranks = SimpleNamespace(parallel=SimpleNamespace(rank=0))
    front = attrgetter("activations")

    def __init__(
        self, stage_id: int, chunks: Sequence[int], run_pass: Callable[[], None], has_expert: bool, has_tokens: bool
    ) -> None:
        super().__init__()
        self.stage_id, self.chunk_numbers, self._run_pass = stage_id, chunks, run_pass
        self.deferred, self._active = DeferredGradients(), 0
        self.chunks = torch.nn.ModuleList(
            torch.nn.Sequential(*(_Layer(run_pass, has_expert, has_tokens) for _ in range(LAYERS))) for _ in chunks
        )

    def forward(self, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        integers = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)  # positions, segments
        return self.chunks[self._active](inputs[0]), *integers

    def loss_fn(self, outputs: tuple[torch.Tensor, ...], labels: Any) -> torch.Tensor:
        return outputs[0].sum()

    def set_active_chunk(self, chunk: int) -> None:
        self._active = chunk

    def list_modules(self, chunk: int) -> list[torch.nn.Module]:
        return list(self.chunks[self.chunk_numbers.index(chunk)])  # type: ignore[arg-type]  # it is a Sequential

    def get_tied_weights_and_groups(self) -> list[Any]:
        return []


class _Layer(torch.nn.Module):
    """y = x + w, and an expert's w where that has tokens; both passes record themselves."""

    def __init__(self, run_pass: Callable[[], None], has_expert: bool, has_tokens: bool) -> None:
        super().__init__()
        self._has_tokens = has_tokens
        self.weight, self._run_pass = torch.nn.Parameter(torch.zeros(1)), run_pass
        self.expert = torch.nn.Parameter(torch.zeros(1)) if has_expert else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._run_pass()
        y = x + self.weight
        if self.expert is not None and self._has_tokens:
            y = y + self.expert
        if y.requires_grad:
            y.register_hook(lambda _: self._run_pass())
        return y


class _Distributed:
    """`torch.distributed` as `Transfers` uses it."""

    Work = Any
    isend, irecv = "isend", "irecv"

    def __init__(self, program: Program, groups: Mapping[str, list[int]], rank: int) -> None:
        self._program, self._groups, self._rank = program, groups, rank

    def get_rank(self, group: str) -> int:
        return self._groups[group].index(self._rank)

    def get_world_size(self, group: str) -> int:
        return len(self._groups[group])

    def reduce(self, tensor: torch.Tensor, group: str, group_dst: int, async_op: bool) -> Any:
        return self._launch(Kernel(group, meets=self._groups[group]))

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
        received[0] = [(torch.Size([1]), dtype) for dtype in (torch.float32, torch.int64, torch.int32)]
