"""A step on one rank, from the first receive to the optimizer: the loop over the units of a schedule that receives,
runs and sends; then what stages and replicas share of the gradients, and the update.

Training, evaluation and first passes are this loop over different units. What a unit is comes from
`training/pipeline/schedule.py`, what crosses a boundary when from `training/pipeline/exchanges.py`, and what becomes of
a gradient from `training/engine/gradient_sums.py`.

P stages, V chunks of layers per stage, M micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch

from batch import Batch, Targets
from models.losses.cross_entropy import Loss
from training.engine.engine import BACKWARD, FORWARD, OPTIMIZER, REDUCTIONS, TRANSFERS, WEIGHTS, StepObserver
from training.pipeline.exchanges import Exchanges, find_input, find_output, is_local, plan_exchanges
from training.pipeline.module import StageModule
from training.pipeline.schedule import Schedule, Unit, UnitKind
from training.pipeline.transfers import Tensors, Transfers
from training.pipeline.weight_gradients import Deferred, compute_gradients

RECEIVE_ACTIVATION, SEND_GRADIENT, SEND_ACTIVATION, RECEIVE_GRADIENT = TRANSFERS
SHARE_TIED, REDUCE = REDUCTIONS
LOAD, POST, FINISH = "LoadMicroBatch", "StartRecv", "FinishSends"


class KeptPass(NamedTuple):
    """The tensors of a forward pass that its backward pass needs. hidden_states: received ones, which get a gradient;
    None for a first chunk. result: the loss, or the hidden states that were sent."""

    hidden_states: torch.Tensor | None
    result: torch.Tensor


class Program(NamedTuple):
    """The program of a rank: exchanges, then its passes, each with the exchanges after it."""

    before_first: Exchanges
    passes: list[tuple[Unit, Exchanges]]


class StageWithLoss(torch.nn.Module):
    """A stage, and the loss after its last chunk, as one module, which DeepSpeed can wrap."""

    def __init__(self, stage: StageModule) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, inputs: Tensors, targets: Targets | None = None, loss: Loss | None = None) -> Any:
        """Run the active chunk. loss: None for one that is not the last."""
        outputs = self.stage(inputs)
        if loss is None:
            return outputs
        assert targets is not None
        return loss(outputs, targets)


class StepGradients(Protocol):
    """The path of a step's gradients from autograd to the optimizer."""

    def start_step(self) -> None:
        """Prepare for the first pass of a step."""

    def start_pass(self) -> None:
        """Prepare for the gradients of the next backward pass, or of one of its halves."""

    def backward(self, loss: torch.Tensor) -> None:
        """Run the backward pass of a loss, times its scale (fp16)."""

    def add(self, parameter: torch.nn.Parameter) -> None:
        """Add `parameter.grad`, which is complete for this pass and which no hook of autograd has seen, or note that
        its gradient has been added to the sum that was lent."""

    def lend_sum(self, parameter: torch.nn.Parameter) -> torch.Tensor | None:
        """Return the sum of a parameter, of its shape, for the caller to add the gradient of this pass to; None where
        `.grad` has to have it."""

    def finish_pass(self) -> None:
        """Add what has not been added of the pass."""

    def share_tied(self) -> None:
        """Sum the gradients of weights that stages share."""

    def reduce(self) -> None:
        """Finish the reduction over replicas, and hand this rank's part to the optimizer."""


class Runner:
    """Runs the steps and evaluations of one rank."""

    observer: StepObserver | None = None

    def __init__(
        self,
        stage: StageModule,
        model: torch.nn.Module,
        schedule: Schedule,
        transfers: Transfers,
        gradients: StepGradients | None,
        update: Callable[[], None],
    ) -> None:
        """model: the stage with its loss, or DeepSpeed's engine around that. gradients: None for a stage that only
        evaluates. update: takes the optimizer's step."""
        self._stage, self._model, self._schedule, self._transfers = stage, model, schedule, transfers
        self._sums, self._update = gradients, update
        self._chunks = schedule.list_chunks(stage.stage_id)
        self._program = self._plan(schedule)  # of a step
        # Each micro-batch is loaded once: before the first chunk, on a rank that has it, else before the last.
        self._loads_at = next((chunk for chunk in (0, schedule.last_chunk) if chunk in self._chunks), None)
        self._kept: dict[tuple[int, int], KeptPass] = {}  # by chunk and micro-batch, as those below
        self._products: dict[tuple[int, int], list[Deferred]] = {}
        self._targets: dict[int, Targets | None] = {}  # by micro-batch
        self._losses: list[Any] = []
        self._passes: dict[UnitKind, Callable[[Unit, Tensors], Tensors]] = {
            UnitKind.forward: self._forward,
            UnitKind.backward: self._backward,
            UnitKind.input_backward: self._backward,
            UnitKind.weight_backward: self._weight_backward,
        }

    def _plan(self, schedule: Schedule, forward_only: bool = False) -> Program:
        stage = self._stage.stage_id
        units = schedule.list_forward(stage) if forward_only else schedule.list_units(stage)
        before_first, *after = plan_exchanges(schedule, forward_only)[stage]
        return Program(before_first, list(zip(units, after, strict=True)))

    def start_step(self) -> Program:
        """Return the program of a step; what `run` does next is training."""
        self._model.train()
        self._gradients.start_step()
        return self._program

    def start_evaluation(self, num_micro_batches: int) -> Program:
        """Return the program of an evaluation of so many micro-batches; what `run` does next is that."""
        self._model.eval()
        return self._plan(replace(self._schedule, num_micro_batches=num_micro_batches), forward_only=True)

    def run(self, program: Program, batches: Iterator[Batch] | None, loss: Loss | None = None) -> list[Any]:
        """Run the passes of a program. Returns what the loss function makes of each micro-batch, on a rank that has it.

        batches: this rank's micro-batches; not read on a rank in the middle. loss: in place of the module's own.
        """
        self._losses, self._loss = [], loss or self._stage.loss_fn
        self._exchange(program.before_first, None, ())
        for unit, exchanges in program.passes:
            self._exchange(exchanges, unit, self._passes[unit.kind](unit, self._receive(unit, batches)))
        with self.observed(FINISH):
            self._transfers.finish()
        return self._losses

    def update(self) -> None:
        """Sum the gradients of a step over stages and replicas, and take the optimizer's step."""
        with self.observed(SHARE_TIED):
            self._gradients.share_tied()
        with self.observed(REDUCE):
            self._gradients.reduce()
        with self.observed(OPTIMIZER):
            self._update()

    def _forward(self, unit: Unit, inputs: Tensors) -> Tensors:
        trains = torch.is_grad_enabled()
        hidden_states = inputs[0].requires_grad_() if unit.chunk and trains else None
        self._stage.set_active_chunk(self._chunks.index(unit.chunk))
        with self.observed(FORWARD):
            if unit.chunk == self._schedule.last_chunk:
                outputs = (self._model(inputs, self._targets.pop(unit.micro_batch), self._loss),)
                self._losses.append(outputs[0].detach())
            else:
                outputs = self._model(inputs)
        if trains:
            self._kept[unit.chunk, unit.micro_batch] = KeptPass(hidden_states, outputs[0])
        return outputs

    def _backward(self, unit: Unit, gradients: Tensors) -> Tensors:
        kept = self._kept.pop((unit.chunk, unit.micro_batch))
        splits = unit.kind is UnitKind.input_backward
        self._stage.set_active_chunk(self._chunks.index(unit.chunk))
        with self.observed(BACKWARD):
            self._gradients.start_pass()
            with self._stage.deferred.defer(splits, self._gradients.lend_sum) as products:
                if gradients:
                    kept.result.backward(*gradients)
                else:
                    self._gradients.backward(kept.result / self._schedule.num_micro_batches)
            self._gradients.finish_pass()
        if splits:
            self._products[unit.chunk, unit.micro_batch] = products
        if kept.hidden_states is None:
            return ()
        assert kept.hidden_states.grad is not None
        return (kept.hidden_states.grad,)

    def _weight_backward(self, unit: Unit, _: Tensors) -> Tensors:
        """Run the second half of a backward pass: the gradients of weights that the first half deferred."""
        with self.observed(WEIGHTS):
            self._gradients.start_pass()
            products = self._products.pop((unit.chunk, unit.micro_batch))
            compute_gradients(products, self._gradients.add, self._gradients.lend_sum)
            self._gradients.finish_pass()
        return ()

    def _receive(self, unit: Unit, batches: Iterator[Batch] | None) -> Tensors:
        """Return the input of a pass, from another rank, an earlier pass of this one, or the loader."""
        if unit.kind is UnitKind.forward and unit.chunk == self._loads_at:
            assert batches is not None
            with self.observed(LOAD):
                batch = next(batches).to(self._transfers.device)
            if self._schedule.last_chunk in self._chunks:
                self._targets[unit.micro_batch] = batch.targets
            if unit.chunk == 0:
                assert batch.inputs is not None
                return self._stage.front(batch.inputs)
        message = find_input(self._schedule, unit)
        if message is None:
            return ()
        if is_local(self._schedule, message):
            return self._transfers.take(message)
        with self.observed(RECEIVE_GRADIENT if message.is_gradient else RECEIVE_ACTIVATION):
            return self._transfers.take(message)

    def _exchange(self, exchanges: Exchanges, unit: Unit | None, result: Tensors) -> None:
        """Pass on what the last pass made, to this rank or another, and start to receive what is planned here."""
        output = None if unit is None else find_output(self._schedule, unit)
        if output is not None and is_local(self._schedule, output):
            self._transfers.hand_over(output, result)
        for exchange in exchanges:
            if exchange.sent is None:
                with self.observed(POST):
                    self._transfers.exchange(exchange, ())
            else:
                with self.observed(SEND_GRADIENT if exchange.sent.is_gradient else SEND_ACTIVATION):
                    self._transfers.exchange(exchange, result)

    @property
    def _gradients(self) -> StepGradients:
        assert self._sums is not None, "this engine only evaluates"
        return self._sums

    @contextmanager
    def observed(self, unit: str) -> Iterator[None]:
        """Tell the observer when a unit of a step begins and ends."""
        if self.observer is not None:
            self.observer.before(unit)
        yield
        if self.observer is not None:
            self.observer.after(unit)
