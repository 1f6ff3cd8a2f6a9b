"""Interleaved 1F1B (2104.04473) on the mechanism of DeepSpeed's engine: a schedule of its instructions, and an engine that knows of chunks.

`PipelineEngine` runs whatever instructions a schedule yields, by its `_INSTRUCTION_MAP`. Here they also name the chunk of layers that a
pass goes through, as those of DeepSpeed's DualPipeV name a phase (deepspeed 0.19.8, runtime/pipe/dualpipev.py); passes, losses, gradients
and the optimizer step remain the engine's own. Only its transfers cannot be used: they block, and know no way from the last rank to the first.

*Transfers.* Activations go from rank r to r + 1 and gradients back, around a ring, since the chunk after the last rank's is the first rank's.
So each rank has four links, one way each: two in, two out. Every rank runs its passes in the same order of chunks and micro-batches, so on a
link what is sent is received in the order of sending, and no tag is needed. Each link has a process group of its own, of two ranks: NCCL may run
all transfers of a group one after the other, in the order of their calls, and a send would wait behind a receive that was posted first.

*Why no rank waits for ever.* A receive is posted one pass ahead, before the pass that it can overlap with; a send is not waited for until the
next but one on its link. A rank that waits for a message waits for an earlier pass of another rank; one that waits for a send waits for
the receiver to come to a pass that lies before those which need what this rank has not computed yet. Both go back in the order of passes, so
no ring of waiting ranks can close, whether the host waits (gloo) or the stream (NCCL). tests/training/engine/test_interleaved.py plays all this
through for many sizes, with sends that are never buffered. Run so far: gloo. NCCL was reasoned out, not run.

P stages, V chunks a stage, M micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine

from training.distributed.p2p import Link, wait_for
from training.pipeline.module import StageModule
from training.pipeline.schedule import Unit, list_forward, list_units


class StartRecv(schedule.BufferOpInstruction):
    """Posts the receive of what the next pass needs; `RecvActivation` and `RecvGrad` wait for it."""


class FinishSends(schedule.PipeInstruction):
    """Waits until all that was sent has been received."""


class InterleavedSchedule(schedule.PipeSchedule):
    """The instructions of one rank. forward_only: of an evaluation, which may have any number of micro-batches."""

    def __init__(
        self, micro_batches: int, stages: int, stage_id: int, num_chunks: int, forward_only: bool = False
    ) -> None:
        super().__init__(micro_batches, stages, stage_id)
        self.num_chunks, self.last_chunk = num_chunks, stages * num_chunks - 1
        self.units = (list_forward if forward_only else list_units)(stage_id, stages, micro_batches, num_chunks)
        self.forward_only = forward_only

    def num_pipe_buffers(self) -> int:
        """One slot a chunk and micro-batch; it holds something only while that micro-batch is in flight."""
        return self.num_chunks * self.micro_batches

    def steps(self) -> Iterator[list[schedule.PipeInstruction]]:
        yield self._start(self.units[:1])
        for number, unit in enumerate(self.units):
            start, run = self._start(self.units[number + 1 : number + 2]), self._run(unit)
            # The first rank knows from its first outputs what will cross a boundary, and how much to receive.
            yield self._receive(unit) + (start + run if number else run + start) + self._send(unit)
        yield [FinishSends()]
        if not self.forward_only:
            yield [schedule.ReduceTiedGrads(), schedule.ReduceGrads(), schedule.OptimizerStep()]

    def _buffer(self, unit: Unit) -> int:
        return unit.chunk // self.stages * self.micro_batches + unit.micro_batch

    def _has_input(self, unit: Unit) -> bool:
        return unit.chunk > 0 if unit.is_forward else unit.chunk < self.last_chunk

    def _start(self, units: Sequence[Unit]) -> list[schedule.PipeInstruction]:
        return [StartRecv(self._buffer(unit), is_forward=unit.is_forward) for unit in units if self._has_input(unit)]

    def _receive(self, unit: Unit) -> list[schedule.PipeInstruction]:
        kind = schedule.RecvActivation if unit.is_forward else schedule.RecvGrad
        return [kind(self._buffer(unit))] if self._has_input(unit) else []

    def _run(self, unit: Unit) -> list[schedule.PipeInstruction]:
        buffer_id, chunk = self._buffer(unit), unit.chunk // self.stages
        if not unit.is_forward:
            return [schedule.BackwardPass(buffer_id, chunk=chunk)]
        load = [schedule.LoadMicroBatch(buffer_id)] if unit.chunk in (0, self.last_chunk) else []
        return [*load, schedule.ForwardPass(buffer_id, chunk=chunk)]

    def _send(self, unit: Unit) -> list[schedule.PipeInstruction]:
        if unit.is_forward:
            return [schedule.SendActivation(self._buffer(unit))] if unit.chunk < self.last_chunk else []
        return [schedule.SendGrad(self._buffer(unit))] if unit.chunk > 0 else []


class InterleavedEngine(PipelineEngine):
    """Trains and evaluates a `StageModule` of several chunks.

    Between passes `is_last_stage` asks for the rank, as the engine means it when it shares out losses and data; within a pass, whether that
    pass ends with the loss.
    """

    first_output_send: bool
    _chunk: int | None = None  # of the pass that is running

    def __init__(self, module: StageModule, optimizer: torch.optim.Optimizer | None, config: dict[str, Any]) -> None:
        """As `deepspeed.initialize` makes the engine of a `PipelineModule`; it chooses the class by the module's, and offers no other."""
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
        self.pipe_buffers |= {"grads": [], "losses": []}  # a received gradient, and the loss of a micro-batch in flight
        self._boundary: list[tuple[torch.Size, torch.dtype]] | None = (
            None  # what crosses every boundary, once that is known
        )
        self._arriving: list[dist.Work] = []
        self._connect()

    def _connect(self) -> None:
        """Makes the four links, and opens each, which NCCL does when the first message crosses: both ends wait for each other then."""
        rings = self.module.topology().get_axis_comm_lists("pipe")
        # by the stage in front of the link; the rank's own groups are those of the links that it is an end of
        forth, back = ([self._pair_up(rings, stage) for stage in range(self.num_stages)] for _ in range(2))
        after, before = (self.grid.stage_to_global((self.stage_id + step) % self.num_stages) for step in (1, -1))
        self._activations_out, self._activations_in = (
            Link(forth[self.stage_id], after),
            Link(forth[self.stage_id - 1], before),
        )
        self._gradients_out, self._gradients_in = (
            Link(back[self.stage_id - 1], before),
            Link(back[self.stage_id], after),
        )
        for out, into, step in (
            (self._activations_out, self._activations_in, 1),
            (self._gradients_out, self._gradients_in, -1),
        ):
            for stage in range(self.num_stages):
                if stage == self.stage_id:
                    out.send([torch.zeros(1, device=self.device)])
                    out.finish()
                elif (stage + step) % self.num_stages == self.stage_id:
                    wait_for(into.receive([torch.zeros(1, device=self.device)]))

    def _pair_up(self, rings: Sequence[Sequence[int]], stage: int) -> dist.ProcessGroup:
        """The group of a stage's rank and the next one's, in this rank's ring. All ranks make those of all rings."""
        return dist.new_subgroups_by_enumeration(
            [[ring[stage], ring[(stage + 1) % self.num_stages]] for ring in rings]
        )[0]

    def is_last_stage(self) -> bool:
        return super().is_last_stage() and self._chunk in (None, len(self.module.chunks) - 1)

    def reset_activation_shape(self) -> None:
        super().reset_activation_shape()
        self._boundary = None

    def _train_schedule(self) -> InterleavedSchedule:
        return InterleavedSchedule(self.micro_batches, self.num_stages, self.stage_id, len(self.module.chunks))

    def _inference_schedule(self, micro_batches: int) -> InterleavedSchedule:
        return InterleavedSchedule(
            micro_batches, self.num_stages, self.stage_id, len(self.module.chunks), forward_only=True
        )

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

    def _exec_start_recv(self, buffer_id: int, is_forward: bool) -> None:
        if self._boundary is None:  # this rank's first pass
            self._boundary = [(tensor.shape, tensor.dtype) for tensor in self._recv_tensor_meta(self.prev_stage)]
            self._grad_layer_buf.clear()  # which has just been allocated, and is not used here
        tensors = [
            torch.empty(shape, dtype=dtype, device=self.device)
            for shape, dtype in self._boundary
            if is_forward or dtype.is_floating_point
        ]
        if is_forward:
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

    def _hold(self, kind: str, buffer_id: int, value: Any) -> None:
        self.pipe_buffers[kind][buffer_id] = value

    def _free(self, buffer_id: int, *kinds: str) -> None:
        for kind in kinds:
            self.pipe_buffers[kind][buffer_id] = None

    _INSTRUCTION_MAP: ClassVar = {
        **PipelineEngine._INSTRUCTION_MAP,
        schedule.ForwardPass: _exec_forward_pass,
        schedule.BackwardPass: _exec_backward_pass,
        StartRecv: _exec_start_recv,
        schedule.RecvActivation: _exec_recv_activations,
        schedule.RecvGrad: _exec_recv_grads,
        schedule.SendActivation: _exec_send_activations,
        schedule.SendGrad: _exec_send_grads,
        FinishSends: _exec_finish_sends,
    }
