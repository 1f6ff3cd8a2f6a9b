"""Runs the units of any schedule (`training/pipeline/schedule.py`) on the mechanism of DeepSpeed's engine.

`PipelineEngine` executes whatever instructions a `PipeSchedule` yields, by its `_INSTRUCTION_MAP`. Here they also name
the chunk of layers that a pass goes through, as those of DeepSpeed's DualPipeV name a phase (deepspeed 0.19.8,
runtime/pipe/dualpipev.py); passes, losses, gradients and the optimizer step remain the engine's own. Only its transfers
cannot be used: they block, and know no way from the last rank to the first.

*Transfers.* Activations go from rank r to r + 1 and gradients back, around a ring, since the chunk after the last
rank's is the first rank's. So each rank has four links, one way each: two in, two out. Both ranks of a link run the
passes that use it in the same order (a schedule promises that, `Schedule.list_units`), so what is sent is received in
the order of sending, and no tag is needed. Each link has a process group of its own, of two ranks: NCCL may run all
transfers of a group one after the other, in the order of their calls, and a send would wait behind a receive that was
posted first.

*Why no rank waits forever.* A receive is posted one pass ahead, before the pass that it can overlap with; a send is not
waited for until the next but one on its link. A rank that waits for a message waits for an earlier pass of another
rank; one that waits for a send waits for the receiver to come to a pass that lies before those which need what this
rank has not computed yet. Both go back in the order of passes, so no ring of waiting ranks can close, whether the host
waits (gloo) or the stream (NCCL). Whether a new schedule keeps to that is seen by `play` of
tests/support/instructions.py, which runs the instructions of all ranks with sends that are never buffered;
tests/training/engine/test_interleaved.py does so for many sizes. Run so far: gloo. NCCL was reasoned out, not run.

P stages, V chunks per stage, M micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.pipe import schedule as instructions
from deepspeed.runtime.pipe.engine import PipelineEngine

from training.distributed.p2p import Link, build_link_options, wait_for
from training.distributed.topology import PIPE
from training.pipeline.module import StageModule
from training.pipeline.schedule import Schedule, Unit, UnitKind

Instructions = list[instructions.PipeInstruction]


class StartRecv(instructions.BufferOpInstruction):
    """Posts the receive of what the next pass needs; `RecvActivation` and `RecvGrad` wait for it."""


class FinishSends(instructions.PipeInstruction):
    """Waits until all that was sent has been received."""


class InstructionSchedule(instructions.PipeSchedule):
    """The units of one rank as instructions of DeepSpeed's. forward_only: of an evaluation."""

    def __init__(self, schedule: Schedule, stage_id: int, forward_only: bool = False) -> None:
        super().__init__(schedule.num_micro_batches, schedule.num_stages, stage_id)
        self.num_chunks = schedule.num_chunks
        self.last_chunk = schedule.num_stages * schedule.num_chunks - 1
        self.units = schedule.list_forward(stage_id) if forward_only else schedule.list_units(stage_id)
        self.forward_only = forward_only

    def num_pipe_buffers(self) -> int:
        """One slot per chunk and micro-batch; it holds something only while that micro-batch is in flight."""
        return self.num_chunks * self.micro_batches

    def steps(self) -> Iterator[Instructions]:
        yield self._start(self.units[:1])
        for number, unit in enumerate(self.units):
            start, run = self._start(self.units[number + 1 : number + 2]), self._run(unit)
            # The first rank knows from its first outputs what will cross a boundary, and how much to receive.
            yield self._receive(unit) + (start + run if number else run + start) + self._send(unit)
        yield [FinishSends()]
        if not self.forward_only:
            yield [instructions.ReduceTiedGrads(), instructions.ReduceGrads(), instructions.OptimizerStep()]

    def _buffer(self, unit: Unit) -> int:
        return unit.chunk // self.stages * self.micro_batches + unit.micro_batch

    def _has_input(self, unit: Unit) -> bool:
        return unit.chunk > 0 if unit.kind is UnitKind.forward else unit.chunk < self.last_chunk

    def _start(self, units: Sequence[Unit]) -> Instructions:
        return [StartRecv(self._buffer(unit), kind=unit.kind) for unit in units if self._has_input(unit)]

    def _receive(self, unit: Unit) -> Instructions:
        receive = instructions.RecvActivation if unit.kind is UnitKind.forward else instructions.RecvGrad
        return [receive(self._buffer(unit))] if self._has_input(unit) else []

    def _run(self, unit: Unit) -> Instructions:
        buffer_id, chunk = self._buffer(unit), unit.chunk // self.stages
        if unit.kind is UnitKind.backward:
            return [instructions.BackwardPass(buffer_id, chunk=chunk)]
        load = [instructions.LoadMicroBatch(buffer_id)] if unit.chunk in (0, self.last_chunk) else []
        return [*load, instructions.ForwardPass(buffer_id, chunk=chunk)]

    def _send(self, unit: Unit) -> Instructions:
        if unit.kind is UnitKind.forward:
            return [instructions.SendActivation(self._buffer(unit))] if unit.chunk < self.last_chunk else []
        return [instructions.SendGrad(self._buffer(unit))] if unit.chunk > 0 else []


class ScheduleEngine(PipelineEngine):
    """Trains and evaluates a `StageModule`, which may hold several chunks, by a schedule.

    Between passes `is_last_stage` asks for the rank, as the engine means it when it shares out losses and data; within
    a pass, whether that pass ends with the loss.
    """

    first_output_send: bool
    _chunk: int | None = None  # of the pass that is running
    _boundary: list[tuple[torch.Size, torch.dtype]] | None = None  # what crosses every boundary, once that is known

    def __init__(
        self, module: StageModule, optimizer: torch.optim.Optimizer | None, config: dict[str, Any], schedule: Schedule
    ) -> None:
        """As `deepspeed.initialize` makes the engine of a `PipelineModule`; it chooses the class by the module's, and
        offers no other."""
        mpu = module.mpu()
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
        self.pipe_buffers |= {"grads": [], "losses": []}  # a received gradient, and the loss of a micro-batch in flight
        self._arriving: list[dist.Work] = []
        self._connect()

    def _connect(self) -> None:
        """Makes the four links, and opens each, which NCCL does when the first message crosses: both ends wait for each
        other then."""
        topology = self.module.rank_topology
        rings = topology.groups(PIPE)
        # by the stage in front of the link; the rank's own groups are those of the links that it is an end of
        forth, back = ([self._pair_up(rings, stage) for stage in range(self.num_stages)] for _ in range(2))
        here = self.stage_id
        after, before = (topology.neighbour(self.global_rank, PIPE, step) for step in (1, -1))
        self._activations_out, self._activations_in = Link(forth[here], after), Link(forth[here - 1], before)
        self._gradients_out, self._gradients_in = Link(back[here - 1], before), Link(back[here], after)
        self._open(self._activations_out, self._activations_in, 1)
        self._open(self._gradients_out, self._gradients_in, -1)

    def _pair_up(self, rings: Sequence[Sequence[int]], stage: int) -> dist.ProcessGroup:
        """The group of a stage's rank and the next one's, in this rank's ring. All ranks make those of all rings."""
        return dist.new_subgroups_by_enumeration(
            [[ring[stage], ring[(stage + 1) % self.num_stages]] for ring in rings],
            pg_options=build_link_options(dist.get_backend()),
        )[0]

    def _open(self, out: Link, into: Link, step: int) -> None:
        """One message from each stage to the one `step` further, stage by stage."""
        for stage in range(self.num_stages):
            if stage == self.stage_id:
                out.send([torch.zeros(1, device=self.device)])
                out.finish()
            elif (stage + step) % self.num_stages == self.stage_id:
                wait_for(into.receive([torch.zeros(1, device=self.device)]))

    def is_last_stage(self) -> bool:
        return super().is_last_stage() and self._chunk in (None, len(self.module.chunks) - 1)

    def reset_activation_shape(self) -> None:
        super().reset_activation_shape()
        self._boundary = None

    def _train_schedule(self) -> InstructionSchedule:
        return InstructionSchedule(self._schedule, self.stage_id)

    def _inference_schedule(self, micro_batches: int) -> InstructionSchedule:
        schedule = replace(self._schedule, num_micro_batches=micro_batches)
        return InstructionSchedule(schedule, self.stage_id, forward_only=True)

    @contextmanager
    def _within(self, chunk: int) -> Iterator[None]:
        self._chunk = chunk
        self.module.expose(chunk)
        try:
            yield
        finally:
            self._chunk = None

    def _exec_forward_pass(self, buffer_id: int, chunk: int) -> None:
        with self._within(chunk):
            super()._exec_forward_pass(buffer_id)
            ends_with_loss = self.is_last_stage()
        if ends_with_loss:
            self._hold("losses", buffer_id, self.loss if torch.is_grad_enabled() else None)
        elif self._boundary is None:
            self._boundary = [(tensor.shape, tensor.dtype) for tensor in self.pipe_buffers["outputs"][buffer_id]]
        if not torch.is_grad_enabled():  # no backward pass gives them back
            self._free(buffer_id, "inputs", "labels", *(["outputs"] if ends_with_loss else []))

    def _exec_backward_pass(self, buffer_id: int, chunk: int) -> None:
        self.loss, self.grad_layer = self.pipe_buffers["losses"][buffer_id], self.pipe_buffers["grads"][buffer_id]
        with self._within(chunk):
            super()._exec_backward_pass(buffer_id)
        self.loss = self.grad_layer = None
        is_first = self.is_first_stage() and chunk == 0  # which sends no gradient
        self._free(buffer_id, "losses", "grads", "outputs", "labels", *(["inputs"] if is_first else []))

    def _exec_start_recv(self, buffer_id: int, kind: UnitKind) -> None:
        if self._boundary is None:  # this rank's first pass
            self._boundary = [(tensor.shape, tensor.dtype) for tensor in self._recv_tensor_meta(self.prev_stage)]
            self._grad_layer_buf.clear()  # which has just been allocated, and is not used here
        tensors = [
            torch.empty(shape, dtype=dtype, device=self.device)
            for shape, dtype in self._boundary
            if kind is UnitKind.forward or dtype.is_floating_point
        ]
        if kind is UnitKind.forward:
            self._hold("inputs", buffer_id, tuple(tensors))
            self._arriving = self._activations_in.receive(tensors)
        else:
            self._hold("grads", buffer_id, tensors)
            self._arriving = self._gradients_in.receive(tensors)

    def _exec_recv_activations(self, buffer_id: int) -> None:
        wait_for(self._arriving)
        for tensor in self.pipe_buffers["inputs"][buffer_id]:
            tensor.requires_grad = tensor.is_floating_point()

    def _exec_recv_grads(self, buffer_id: int) -> None:
        wait_for(self._arriving)

    def _exec_send_activations(self, buffer_id: int) -> None:
        outputs = self.pipe_buffers["outputs"][buffer_id]
        assert [(tensor.shape, tensor.dtype) for tensor in outputs] == self._boundary, (
            "the same crosses every boundary of a step"
        )
        if self.first_output_send and self.stage_id < self.num_stages - 1:  # the first rank knows from its own outputs
            self._send_tensor_meta(outputs, self.next_stage)
        self.first_output_send = False
        self._activations_out.send(outputs)
        if not torch.is_grad_enabled():
            self._free(buffer_id, "outputs")

    def _exec_send_grads(self, buffer_id: int) -> None:
        gradients = [tensor.grad for tensor in self.pipe_buffers["inputs"][buffer_id] if tensor.is_floating_point()]
        self._gradients_out.send(gradients)
        self._free(buffer_id, "inputs")

    def _exec_finish_sends(self) -> None:
        self._activations_out.finish()
        self._gradients_out.finish()

    def _hold(self, name: str, buffer_id: int, value: Any) -> None:
        self.pipe_buffers[name][buffer_id] = value

    def _free(self, buffer_id: int, *names: str) -> None:
        for name in names:
            self.pipe_buffers[name][buffer_id] = None

    _INSTRUCTION_MAP: ClassVar = {
        **PipelineEngine._INSTRUCTION_MAP,
        instructions.ForwardPass: _exec_forward_pass,
        instructions.BackwardPass: _exec_backward_pass,
        StartRecv: _exec_start_recv,
        instructions.RecvActivation: _exec_recv_activations,
        instructions.RecvGrad: _exec_recv_grads,
        instructions.SendActivation: _exec_send_activations,
        instructions.SendGrad: _exec_send_grads,
        FinishSends: _exec_finish_sends,
    }
