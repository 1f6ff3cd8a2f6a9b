"""The loop: one optimizer step after another, with evaluation, saving and reports at their steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch

import console
from data.step_totals import StepTotals
from errors import UserError
from training.checkpoint.run_folder import RunFolder
from training.checkpoint.state import TrainerState
from training.checkpoint.writer import CheckpointWriter
from training.config.schema import OnNonfinite, OptimizerName, Precision, RunConfig
from training.distributed.interrupts import Interrupts
from training.distributed.process import make_host_group
from training.distributed.ranks import raise_together
from training.engine.engine import Engine
from training.engine.steps import evaluate, is_nonfinite, train_step
from training.inputs.cadence import is_due, steps_between
from training.inputs.step_budget import StepBudget
from training.inputs.step_totals import SharedTotals
from training.objectives.registry import get_objective
from training.observability.metrics import Record, Reporter
from training.observability.nonfinite_probe import NonfiniteProbe
from training.observability.step_trace import StepTrace
from training.observability.telemetry import Telemetry

_NAMED_SAMPLES = 64  # of a global batch that is not finite


class TrainingLoop:
    """Drives the engine of this rank. Every rank runs the same steps; rank 0, which reads inputs, also reports."""

    def __init__(
        self,
        engine: Engine,
        config: RunConfig,
        budget: StepBudget,
        state: TrainerState,
        folder: RunFolder,
        *,
        train_loader: Any,
        eval_loader: Any | None,
        reporters: list[Reporter],
        telemetry: Telemetry,
        pause_watchdog: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """state: where the run starts. reporters: empty on all ranks but the main one.
        pause_watchdog: what waiting for the disk is done within."""
        self.engine, self.train_loader, self.eval_loader = engine, train_loader, eval_loader
        self.config, self.budget, self.state, self.folder, self.reporters = config, budget, state, folder, reporters
        self._telemetry, self._trace = telemetry, StepTrace(config.profile_trace, folder.path)
        self.last_eval: Record | None = None
        self._pause_watchdog = pause_watchdog
        self._writer = CheckpointWriter(
            engine, folder.checkpoints, config.keep_last, config.keep_best, config.async_save
        )
        self._probe = NonfiniteProbe(engine.module, engine.device)
        group = make_host_group()
        self._interrupts = Interrupts(
            folder.path, config.grace_seconds, config.save_minutes, is_main=bool(reporters), group=group
        )
        self._eval_every = steps_between(config.eval_steps, config.eval_epochs, len(train_loader))
        self._save_every = steps_between(config.save_steps, config.save_epochs, len(train_loader))
        self._totals = SharedTotals(train_loader, budget.last_step, group)
        self.signum = 0  # of the signal that ended the run early
        self._interval = _Interval(torch.zeros((), dtype=torch.float64, device=engine.device))
        objective = get_objective(config)
        self._mean_over = objective.mean_over
        self._metrics = objective.build_metrics(engine.module.loss_fn, engine.device)

    def run(self) -> TrainerState:
        """Trains to `budget.last_step`, or until it is asked to end; evaluates and saves there, and returns where the
        run stands.

        A signal that ends it leaves time for saving alone, and its number in `signum`. Raises UserError where there is
        no room to save.
        """
        self._writer.check_room(num_moments=2 if self.config.optimizer.name is OptimizerName.adamw else 0)
        if self.config.eval_on_start and self.eval_loader is not None and self.state.step == 0:
            self._evaluate()
        micro_batches = self.train_loader.iterate(self.state.step, self.budget.last_step)
        self._interval.start()
        self._interrupts.start()
        try:
            ended = self.state.step >= self.budget.last_step
            while not ended:
                ended = self._step_and_after(micro_batches)
            # Launchers repeat their signals, and the next one would end a rank that no longer listens.
            with self._pause_watchdog():
                self._writer.wait()
        finally:
            self._interrupts.close()
        return self.state

    def _step_and_after(self, micro_batches: Any) -> bool:
        """One step, and what is due after it. Returns whether the run ends here."""
        number = self.state.step + 1
        profiled, traced = number == self.config.profile_step, number == self.config.profile_trace
        totals = self._totals.of_step(self.state.step)
        if traced:
            self._off_the_clock(self._trace.start)
        self._telemetry.start_step(profiled)
        loss = self._train_step(micro_batches, totals)
        request = self._interrupts.agree(is_nonfinite(self.engine, loss))
        spans = self._telemetry.finish_step()
        if traced:
            self._off_the_clock(self._trace.finish)
        self.signum = request.signum
        self._account(loss, totals, request.nonfinite)
        if profiled:
            self._off_the_clock(lambda: self._telemetry.draw(spans, self.state.step, self.folder.path))
        step = self.state.step
        last = step == self.budget.last_step or request.ends
        if step % self.config.logging_steps == 0 or last:
            self._report_interval()
        if self.eval_loader is not None and (is_due(step, self._eval_every) or last) and not request.signum:
            self._off_the_clock(self._evaluate)
        if is_due(step, self._save_every) or last or request.save:
            self._off_the_clock(self._save)
            self._interrupts.saved()
        return last

    def _train_step(self, micro_batches: Any, totals: StepTotals) -> torch.Tensor:
        loss, self._learning_rate = train_step(
            self.engine, micro_batches, self.config, self.state.step, self.budget.total_steps, totals=totals
        )
        return loss

    def _account(self, loss: torch.Tensor, totals: StepTotals, nonfinite: bool) -> None:
        """Counts the step. Raises UserError, together on all ranks, for one that is not finite and not to be
        skipped."""
        step = self.state.step
        if nonfinite:
            self._report_nonfinite(step, loss)
        self._probe.reset()
        if self._metrics is not None:
            self._metrics.add_step(counts=not nonfinite)
        if self.reporters and not nonfinite:
            self._interval.add(loss, totals.count_terms(self._mean_over), totals.num_tokens)
        if nonfinite or self.engine.has_skipped_step():
            self._interval.num_skipped += 1
        elif self.reporters:
            self._interval.grad_norm = self.engine.gradient_norm()
        self.state = replace(self.state, step=step + 1, num_tokens=self.state.num_tokens + totals.num_tokens)
        for reporter in self.reporters:
            reporter.advance(step + 1)

    def _report_nonfinite(self, step: int, loss: torch.Tensor) -> None:
        error, place = None, self._probe.find_first()
        if self.reporters:
            text = self._describe_nonfinite(step, loss, place)
            if self.config.on_nonfinite is OnNonfinite.skip:
                console.say(f"skipped {text}")
            else:
                error = UserError(
                    f"{text}. Neither weights nor checkpoints have taken it; look at the samples or lower "
                    "learning_rate, and continue with resume=latest; on_nonfinite=skip skips such steps"
                )
        if self.config.on_nonfinite is OnNonfinite.stop:
            with self._pause_watchdog():
                self._writer.wait()
            raise_together(error)

    def _describe_nonfinite(self, step: int, loss: torch.Tensor, place: str) -> str:
        ids = self.train_loader.sample_ids(step).tolist()
        named = ", ".join(map(str, ids[:_NAMED_SAMPLES]))
        if len(ids) > _NAMED_SAMPLES:
            named += f" and {len(ids) - _NAMED_SAMPLES} more"
        norm = float(self.engine.gradient_norm())
        return (
            f"step {step + 1}: loss {loss.item():g}, gradient norm {norm:g}; samples {named} of train_file "
            f"(counted from 0); first seen {place}"
        )

    def _report_interval(self) -> None:
        measured = self._telemetry.gather()  # of all ranks, by all ranks
        metrics = self._metrics.finish_interval() if self._metrics is not None else {}
        routers = self.engine.module.routers
        routed = routers.finish_interval() if routers is not None else {}
        if not self.reporters or self._interval.is_empty or measured is None:
            return
        grad_norm, skipped = self._interval.grad_norm, self._describe_skipped()
        loss, tokens_per_second, step_time = self._interval.finish()
        self._report(
            {
                "step": self.state.step,
                "loss": loss,
                **metrics,
                **routed,
                "grad_norm": None if grad_norm is None else float(grad_norm),
                "learning_rate": self._learning_rate,
                "num_tokens": self.state.num_tokens,
                "tokens_per_second": tokens_per_second,
                "step_time": step_time,
                **skipped,
                **self._telemetry.describe(measured, tokens_per_second),
            }
        )

    def _describe_skipped(self) -> Record:
        """Where a step may be skipped and the run continues: how many were since the last line, and, in fp16, the scale
        that they have led to."""
        scaler = self.engine.read_loss_scaler() if self.config.precision is Precision.fp16 else {}
        skips = scaler or self.config.on_nonfinite is OnNonfinite.skip
        counted = {"skipped_steps": self._interval.num_skipped} if skips else {}
        return counted | ({"loss_scale": scaler["cur_scale"]} if scaler else {})

    def _evaluate(self) -> None:
        loader, size = self.eval_loader, self.budget.evaluation
        assert loader is not None and size is not None
        loss = evaluate(self.engine, loader.iterate(), len(loader), size.terms, bounds=size.documents)
        metrics = self._metrics.finish_evaluation() if self._metrics is not None else {}
        self.last_eval = {"step": self.state.step, "eval_loss": loss, **metrics, "eval_tokens": size.targets}
        self._report(self.last_eval)

    def _save(self) -> None:
        last = self.last_eval
        eval_loss = last["eval_loss"] if last is not None and last["step"] == self.state.step else None
        with self._pause_watchdog():
            self._writer.save(replace(self.state, eval_loss=eval_loss))

    def _report(self, record: Record) -> None:
        for reporter in self.reporters:
            reporter.report(record)

    def _off_the_clock(self, work: Callable[[], None]) -> None:
        """Runs `work` without counting its time as training."""
        self._interval.pause()
        work()
        self._interval.resume()


class _Interval:
    """The steps since the last report. The loss stays on the device until it is asked for: reading it waits for the
    step.

    num_skipped: of them, or in fp16 beside their losses, those that left the weights as they were. grad_norm: of the
    last step that did not; None while there is none.
    """

    def __init__(self, zero: torch.Tensor) -> None:
        self._zero = zero
        self.start()

    def start(self) -> None:
        self._loss_sum = self._zero.clone()  # of tokens, or of pairs
        self._num_terms = self._num_tokens = self._num_steps = self.num_skipped = 0
        self.grad_norm: torch.Tensor | None = None
        self._seconds, self._since = 0.0, time.perf_counter()

    def add(self, loss: torch.Tensor, num_terms: int, num_tokens: int) -> None:
        self._loss_sum += loss.detach().double().squeeze() * num_terms
        self._num_terms += num_terms
        self._num_tokens += num_tokens
        self._num_steps += 1

    @property
    def is_empty(self) -> bool:
        return self._num_steps == 0

    def pause(self) -> None:
        self._seconds += time.perf_counter() - self._since

    def resume(self) -> None:
        self._since = time.perf_counter()

    def finish(self) -> tuple[float, float, float]:
        """(mean loss a target token or a pair, tokens a second, seconds a step) since the last call; begins a new
        interval."""
        loss = self._loss_sum.item() / self._num_terms
        self.pause()
        result = (loss, self._num_tokens / self._seconds, self._seconds / self._num_steps)
        self.start()
        return result
