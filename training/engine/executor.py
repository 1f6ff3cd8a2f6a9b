"""Runs the units of any schedule (`training/pipeline/schedule.py`) on the mechanism of DeepSpeed's engine.

`PipelineEngine` executes whatever instructions a `PipeSchedule` yields, by its `_INSTRUCTION_MAP`. Here they also name
the chunk of layers that a pass goes through, as those of DeepSpeed's DualPipeV name a phase (deepspeed 0.19.8,
runtime/pipe/dualpipev.py); passes, losses, gradients and the optimizer step remain the engine's own. Only its transfers
cannot be used: they block, and do not connect the last rank to the first.

*Transfers.* Activations go from rank r to r + 1 and gradients back, around a ring, since the chunk after the last
rank's is the first rank's. So each rank has four one-way links: two in, two out. Both ranks of a link run the passes
that use it in the same order (guaranteed by `Schedule.list_units`), so messages are received in the order of sending,
and no tag is needed. Each link has a process group of its own, of two ranks: NCCL may run all transfers of a group one
after the other, in the order of their calls, and a send would wait for a receive that was posted first. Positions and
segments are sent to a rank once: it keeps them for its later chunks.

*Why no rank waits forever.* A receive is posted one pass ahead, before the pass that it can overlap with; a send is not
waited for until the next but one on its link. A rank that waits for a message waits for an earlier pass of another
rank; one that waits for a send waits for the receiver to reach a pass that precedes those which need what this rank has
not computed yet. Both go back in the order of passes, so no cycle of waiting ranks can form, whether the host waits
(gloo) or the stream (NCCL). `play` of tests/support/instructions.py checks this for a schedule: it runs the
instructions of all ranks with sends that are never buffered; tests/training/engine/test_schedules.py does so for many
sizes. Run so far: gloo. For NCCL it was argued, not run.

P stages, V chunks per stage, M micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.pipe import schedule as instructions
from deepspeed.runtime.pipe.engine import PipelineEngine

from training.distributed.p2p import Link, build_link_options, wait_for
from training.distributed.topology import PIPE
from training.engine.shard_groups import ShardGroups, shard_within
from training.engine.zero_patches import build_adder
from training.pipeline.module import StageModule
from training.pipeline.schedule import Schedule, Unit, UnitKind
from training.pipeline.weight_gradients import compute_gradients

Instructions = list[instructions.PipeInstruction]


class StartRecv(instructions.BufferOpInstruction):
    """Posts the receive for the next pass; `RecvActivation` and `RecvGrad` wait for it."""


class WeightPass(instructions.BufferOpInstruction):
    """The second half of a backward pass: the gradients of weights that the first half deferred."""


class FinishSends(instructions.PipeInstruction):
    """Waits until all that was sent has been received."""


class InstructionSchedule(instructions.PipeSchedule):
    """The units of one rank as DeepSpeed's instructions. forward_only: for an evaluation.

    Each names its chunk. Activations come from the chunk before it and go to the one after it, gradients the other way.
    """

    def __init__(self, schedule: Schedule, stage_id: int, forward_only: bool = False) -> None:
        super().__init__(schedule.num_micro_batches, schedule.num_stages, stage_id)
        self.chunks, self.last_chunk = schedule.list_chunks(stage_id), schedule.last_chunk
        self._find_stage = schedule.find_stage
        self.units = schedule.list_forward(stage_id) if forward_only else schedule.list_units(stage_id)
        self.forward_only = forward_only

    def num_pipe_buffers(self) -> int:
        """Return one slot per chunk and micro-batch; a slot is empty unless that micro-batch is in flight."""
        return len(self.chunks) * self.micro_batches

    def steps(self) -> Iterator[Instructions]:
        return iter(self._listed)

    @cached_property
    def _listed(self) -> list[Instructions]:
        return list(self._list())

    def _list(self) -> Iterator[Instructions]:
        yield self._start(self.units[:1])
        for number, unit in enumerate(self.units):
            start, run = self._start(self.units[number + 1 : number + 2]), self._run(unit)
            # The first rank learns the shapes that cross a boundary, and so what to receive, from its first outputs.
            yield self._receive(unit) + (start + run if number else run + start) + self._send(unit)
        yield [FinishSends()]
        if not self.forward_only:
            yield [instructions.ReduceTiedGrads(), instructions.ReduceGrads(), instructions.OptimizerStep()]

    def _slot(self, chunk: int, micro_batch: int) -> int:
        return self.chunks.index(chunk) * self.micro_batches + micro_batch

    def _arguments(self, unit: Unit) -> dict[str, int]:
        return {"buffer_id": self._slot(unit.chunk, unit.micro_batch), "chunk": unit.chunk}

    def _is_here(self, chunk: int) -> bool:
        return self._find_stage(chunk) == self.stage_id

    def _source(self, unit: Unit) -> int | None:
        """The chunk whose output, or gradient, the pass needs; None for a first forward, a last backward, or a weight
        pass."""
        if unit.kind is UnitKind.forward:
            return unit.chunk - 1 if unit.chunk else None
        return unit.chunk + 1 if unit.kind is not UnitKind.weight_backward and unit.chunk < self.last_chunk else None

    def _comes_from_other_rank(self, unit: Unit) -> bool:
        source = self._source(unit)
        return source is not None and not self._is_here(source)

    def _start(self, units: Sequence[Unit]) -> Instructions:
        return [
            StartRecv(**self._arguments(unit), kind=unit.kind) for unit in units if self._comes_from_other_rank(unit)
        ]

    def _receive(self, unit: Unit) -> Instructions:
        if not self._comes_from_other_rank(unit):
            return []
        if unit.kind is not UnitKind.forward:
            return [instructions.RecvGrad(**self._arguments(unit))]
        first_id = self._slot(self.chunks[0], unit.micro_batch)
        return [instructions.RecvActivation(**self._arguments(unit), first_id=first_id)]

    def _run(self, unit: Unit) -> Instructions:
        if unit.kind is UnitKind.weight_backward:
            return [WeightPass(**self._arguments(unit))]
        if unit.kind is not UnitKind.forward:
            return [instructions.BackwardPass(**self._arguments(unit), splits=unit.kind is UnitKind.input_backward)]
        return [*self._load(unit), instructions.ForwardPass(**self._arguments(unit))]

    def _load(self, unit: Unit) -> Instructions:
        """Load each micro-batch once: before the first chunk, on a rank that has it, else before the last."""
        loads_at = next((chunk for chunk in (0, self.last_chunk) if self._is_here(chunk)), None)
        if unit.chunk != loads_at:
            return []
        labels_id = self._slot(self.last_chunk, unit.micro_batch) if self._is_here(self.last_chunk) else None
        return [instructions.LoadMicroBatch(**self._arguments(unit), labels_id=labels_id)]

    def _send(self, unit: Unit) -> Instructions:
        if unit.kind is UnitKind.forward:
            return self._send_to(unit, unit.chunk + 1, instructions.SendActivation)
        return (
            [] if unit.kind is UnitKind.weight_backward else self._send_to(unit, unit.chunk - 1, instructions.SendGrad)
        )

    def _send_to(self, unit: Unit, to: int, send: type[instructions.BufferOpInstruction]) -> Instructions:
        """Send to a chunk of another rank, or, by its buffer's number, to one of this rank."""
        if not 0 <= to <= self.last_chunk:
            return []
        return [send(**self._arguments(unit), to=self._slot(to, unit.micro_batch) if self._is_here(to) else None)]


class ScheduleEngine(PipelineEngine):
    """DeepSpeed's pipeline engine for a `StageModule` of one or several chunks, under any schedule."""

    first_output_send: bool
    total_loss: torch.Tensor | None
    _is_connected = False
    _boundary: list[tuple[torch.Size, torch.dtype]] | None = (
        None  # of the tensors that cross every boundary, once known
    )

    def __init__(
        self,
        module: StageModule,
        optimizer: torch.optim.Optimizer | None,
        config: dict[str, Any],
        schedule: Schedule,
        shard_groups: ShardGroups | None = None,
    ) -> None:
        """Build the engine as `deepspeed.initialize` does for a `PipelineModule`, which cannot build another class.

        shard_groups: None where ZeRO partitions over all replicas.
        """
        mpu = module.mpu()
        self._shard_groups = shard_groups  # which the constructor needs
        super().__init__(
            args=None,
            model=module,
            optimizer=optimizer,
            mpu=mpu,
            config=config,
            config_class=DeepSpeedConfig(config, mpu),
        )
        self._configure_python_gc()
        self._schedule = schedule
        kinds = ("inputs", "labels", "outputs", "losses", "grads", "products", "integers")
        self.pipe_buffers: dict[str, list[Any]] = {kind: [] for kind in kinds}
        self.num_pipe_buffers = 0
        self._arriving: list[dist.Work] = []
        self._train_instructions = InstructionSchedule(schedule, self.stage_id)
        self.add_to_sum = build_adder(self.optimizer)
        self._connect()

    def _configure_zero_optimizer(self, optimizer: Any) -> Any:
        with shard_within(self, self._shard_groups):
            return super()._configure_zero_optimizer(optimizer)

    def _configure_bf16_optimizer(self, optimizer: Any) -> Any:
        with shard_within(self, self._shard_groups):
            return super()._configure_bf16_optimizer(optimizer)

    def _connect(self) -> None:
        """Build the links on which activations or gradients go from rank to rank, and open each with a first message:
        NCCL connects at that time, and both ends wait for each other."""
        rings = self.module.rank_topology.groups(PIPE)
        own = next(ring for ring in rings if self.global_rank in ring)
        self._links: dict[tuple[UnitKind, int, int], Link] = {}
        for kind, start, stop in self._schedule.list_links():
            group = self._pair_up(rings, start, stop)
            if self.stage_id in (start, stop):
                peer = own[stop if self.stage_id == start else start]
                self._links[kind, start, stop] = Link(group, peer, self._schedule.sends_in_flight)
        for (_, start, _), link in self._links.items():
            if self.stage_id == start:
                link.send([torch.zeros(1, device=self.device)])
                link.finish()
            else:
                wait_for(link.receive([torch.zeros(1, device=self.device)]))
        self._is_connected = True

    def _pair_up(self, rings: Sequence[Sequence[int]], start: int, stop: int) -> dist.ProcessGroup:
        """The group of two stages' ranks in this rank's ring. All ranks create the groups of all rings."""
        return dist.new_subgroups_by_enumeration(
            [[ring[start], ring[stop]] for ring in rings], pg_options=build_link_options(dist.get_backend())
        )[0]

    def _find_link(self, kind: UnitKind, chunk: int, to: int) -> Link:
        """kind: forward for activations."""
        return self._links[kind, self._schedule.find_stage(chunk), self._schedule.find_stage(to)]

    def is_last_stage(self) -> bool:
        """Returns whether this rank has the loss, as the engine needs for losses and data. While the engine is being
        built, whether it is the last rank of its pipeline, as DeepSpeed needs to connect neighbours."""
        return self.module.has_loss if self._is_connected else super().is_last_stage()

    def _loss_stage_global_rank(self) -> int:
        return self.grid.stage_to_global(self._schedule.find_stage(self._schedule.last_chunk))

    def reset_activation_shape(self) -> None:
        super().reset_activation_shape()
        self._boundary = None

    def _train_schedule(self) -> InstructionSchedule:
        return self._train_instructions

    def _inference_schedule(self, micro_batches: int) -> InstructionSchedule:
        schedule = replace(self._schedule, num_micro_batches=micro_batches)
        return InstructionSchedule(schedule, self.stage_id, forward_only=True)

    def _set_active_chunk(self, chunk: int) -> None:
        self.module.set_active_chunk(self._schedule.list_chunks(self.stage_id).index(chunk))

    def _exec_load_micro_batch(self, buffer_id: int, chunk: int, labels_id: int | None) -> None:
        inputs, labels = self._next_batch()
        if chunk == 0:
            self._hold("inputs", buffer_id, inputs)
        if labels_id is not None:
            self._hold("labels", labels_id, labels)

    def _exec_forward_pass(self, buffer_id: int, chunk: int) -> None:
        """Replaces DeepSpeed's, which clones a chunk's inputs, and between two passes does work that only other engines
        need."""
        trains = torch.is_grad_enabled()
        if trains:
            self.optimizer.clear_backward_seen_flag()  # at a step's first pass: the last step's gradients are gone
        self._set_active_chunk(chunk)
        outputs = self.module(self.pipe_buffers["inputs"][buffer_id])
        if chunk == self._schedule.last_chunk:
            loss = self.module.loss_fn(outputs, self.pipe_buffers["labels"][buffer_id])
            self.fwd_outputs.append(loss.detach())
            if trains:
                self.total_loss = loss.detach() + (0 if self.total_loss is None else self.total_loss)
                self._hold("losses", buffer_id, loss)
        else:
            self._boundary = self._boundary or [(tensor.shape, tensor.dtype) for tensor in outputs]
            self._hold("outputs", buffer_id, outputs)
        if not trains:  # no backward pass frees them
            self._free(buffer_id, "inputs", "labels")

    def _exec_backward_pass(self, buffer_id: int, chunk: int, splits: bool) -> None:
        loss, gradients = self.pipe_buffers["losses"][buffer_id], self.pipe_buffers["grads"][buffer_id]
        self._set_active_chunk(chunk)
        with self.module.deferred.defer() if splits else nullcontext() as products:
            if loss is not None:
                self.optimizer.scale_if_loss(loss / self.gradient_accumulation_steps()).backward()
            else:
                outputs = self.pipe_buffers["outputs"][buffer_id]
                (hidden_states,) = (tensor for tensor in outputs if tensor.is_floating_point())
                hidden_states.backward(*gradients)
        self._hold("products", buffer_id, products)
        self._free(buffer_id, "losses", "grads", "outputs", "labels", *([] if chunk else ["inputs"]))

    def _exec_weight_pass(self, buffer_id: int, chunk: int) -> None:
        compute_gradients(self.pipe_buffers["products"][buffer_id], self.add_to_sum)
        self._free(buffer_id, "products")

    def _exec_start_recv(self, buffer_id: int, chunk: int, kind: UnitKind) -> None:
        if self._boundary is None:  # this rank's first pass
            self._boundary = [(tensor.shape, tensor.dtype) for tensor in self._recv_tensor_meta(self.prev_stage)]
            self._grad_layer_buf.clear()  # just allocated, and not used here
        is_forward = kind is UnitKind.forward
        has_integers = is_forward and self._schedule.is_first_of_rank(chunk)
        tensors = [
            torch.empty(shape, dtype=dtype, device=self.device)
            for shape, dtype in self._boundary
            if has_integers or dtype.is_floating_point
        ]
        self._hold("inputs" if is_forward else "grads", buffer_id, tuple(tensors))
        link = (
            self._find_link(UnitKind.forward, chunk - 1, chunk)
            if is_forward
            else self._find_link(UnitKind.backward, chunk + 1, chunk)
        )
        self._arriving = link.receive(tensors)

    def _exec_recv_activations(self, buffer_id: int, chunk: int, first_id: int) -> None:
        wait_for(self._arriving)
        if buffer_id != first_id:
            self._hold("inputs", buffer_id, (*self.pipe_buffers["inputs"][buffer_id], *self._recall(first_id, chunk)))
        for tensor in self.pipe_buffers["inputs"][buffer_id]:
            tensor.requires_grad = tensor.is_floating_point()

    def _recall(self, first_id: int, chunk: int) -> list[torch.Tensor]:
        """The integer tensors of a micro-batch that this rank received earlier, in the slot `first_id`."""
        integers = self.pipe_buffers["integers"][first_id]
        if chunk == self._schedule.list_chunks(self.stage_id)[-1]:
            self._free(first_id, "integers")
        return integers

    def _exec_recv_grads(self, buffer_id: int, chunk: int) -> None:
        wait_for(self._arriving)

    def _exec_send_activations(self, buffer_id: int, chunk: int, to: int | None) -> None:
        outputs = self.pipe_buffers["outputs"][buffer_id]
        assert [(tensor.shape, tensor.dtype) for tensor in outputs] == self._boundary, (
            "the same shapes cross every boundary of a step"
        )
        if to is None:
            if self.first_output_send and self.stage_id < self.num_stages - 1:  # the first rank knows its own
                self._send_tensor_meta(outputs, self.next_stage)
            self.first_output_send = False
            hidden_states, *integers = outputs
            if self._schedule.is_first_of_rank(chunk) and self._schedule.num_chunks > 1:
                self._hold("integers", buffer_id, integers)
            sent = outputs if self._schedule.is_first_of_rank(chunk + 1) else (hidden_states,)
            self._find_link(UnitKind.forward, chunk, chunk + 1).send(sent)
        else:
            detached = [tensor.detach() for tensor in outputs]
            self._hold("inputs", to, tuple(tensor.requires_grad_(tensor.is_floating_point()) for tensor in detached))
        if not torch.is_grad_enabled():
            self._free(buffer_id, "outputs")

    def _exec_send_grads(self, buffer_id: int, chunk: int, to: int | None) -> None:
        gradients = [tensor.grad for tensor in self.pipe_buffers["inputs"][buffer_id] if tensor.is_floating_point()]
        if to is None:
            self._find_link(UnitKind.backward, chunk, chunk - 1).send(gradients)
        else:
            self._hold("grads", to, gradients)
        self._free(buffer_id, "inputs")

    def _exec_finish_sends(self) -> None:
        for (_, start, _), link in self._links.items():
            if start == self.stage_id:
                link.finish()

    def _hold(self, name: str, buffer_id: int, value: Any) -> None:
        self.pipe_buffers[name][buffer_id] = value

    def _free(self, buffer_id: int, *names: str) -> None:
        for name in names:
            self.pipe_buffers[name][buffer_id] = None

    _INSTRUCTION_MAP: ClassVar = {
        **PipelineEngine._INSTRUCTION_MAP,
        instructions.LoadMicroBatch: _exec_load_micro_batch,
        instructions.ForwardPass: _exec_forward_pass,
        instructions.BackwardPass: _exec_backward_pass,
        WeightPass: _exec_weight_pass,
        StartRecv: _exec_start_recv,
        instructions.RecvActivation: _exec_recv_activations,
        instructions.RecvGrad: _exec_recv_grads,
        instructions.SendActivation: _exec_send_activations,
        instructions.SendGrad: _exec_send_grads,
        FinishSends: _exec_finish_sends,
    }
