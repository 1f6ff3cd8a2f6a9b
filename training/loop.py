"""The loop: one optimizer step after another, with evaluation, saving and reports at their steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch

import console
from data.step_totals import StepTotals
from errors import UserError
from training.checkpoint.best import update_best
from training.checkpoint.retention import Retention
from training.checkpoint.run_folder import RunFolder
from training.checkpoint.state import TrainerState
from training.checkpoint.writer import CheckpointWriter
from training.config.criterion import Criterion
from training.config.schema import OnNonfinite, OptimizerName, Precision, RunConfig
from training.distributed.interrupts import Interrupt, Interrupts
from training.distributed.process import make_host_group
from training.distributed.ranks import raise_together
from training.engine.engine import Engine
from training.engine.steps import is_nonfinite, train_step
from training.evaluations import Evaluations, check_metric
from training.inputs.cadence import is_due, steps_between
from training.inputs.skipped_data import is_skipped, iterate_trained
from training.inputs.step_budget import StepBudget
from training.inputs.step_totals import SharedTotals
from training.objectives.registry import get_objective
from training.observability.interval import Interval
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
        eval_loaders: Mapping[str, Any],
        reporters: list[Reporter],
        telemetry: Telemetry,
        pause_watchdog: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """state: where the run starts. eval_loaders: by the names of their files. reporters: empty on all ranks
        but the main one. pause_watchdog: what waiting for the disk is done within."""
        self.engine, self.train_loader = engine, train_loader
        self.config, self.budget, self.state, self.folder, self.reporters = config, budget, state, folder, reporters
        self._telemetry, self._trace = telemetry, StepTrace(config.profile_trace, folder.path)
        self.last_eval: Record | None = {"step": state.step, **state.evaluation} if state.evaluation else None
        self._criterion = Criterion.of(config)
        self._pause_watchdog = pause_watchdog
        self._writer = CheckpointWriter(engine, folder.checkpoints, Retention.of(config), config.async_save)
        self._probe = NonfiniteProbe(engine.module, engine.device)
        group = make_host_group()
        self._interrupts = Interrupts(
            folder.path, config.grace_seconds, config.save_minutes, is_main=bool(reporters), group=group
        )
        self._eval_every = steps_between(config.eval_steps, config.eval_epochs, len(train_loader))
        self._save_every = steps_between(config.save_steps, config.save_epochs, len(train_loader))
        self._totals = SharedTotals(train_loader, budget.last_step, group)
        self.signum = 0  # of the signal that ended the run early
        self.ended_by = "the last step"
        self._interval = Interval(torch.zeros((), dtype=torch.float64, device=engine.device))
        objective = get_objective(config)
        self._mean_over = objective.mean_over
        self._metrics = objective.build_metrics(engine.module.loss_fn, engine.device)
        self._evaluations = Evaluations(engine, eval_loaders, budget.evaluations, self._metrics)

    def run(self) -> TrainerState:
        """Trains to `budget.last_step`, or until it is asked to end; evaluates and saves there, and returns where the
        run stands.

        A signal that ends it leaves time for saving alone, and its number in `signum`. Raises UserError where there is
        no room to save.
        """
        self._writer.check_room(num_moments=2 if self.config.optimizer.name is OptimizerName.adamw else 0)
        if self.config.eval_on_start and self._evaluations and self.state.step == 0:
            self._evaluate()
        micro_batches = iterate_trained(
            self.train_loader, self.state.step, self.budget.last_step, self.config.skip_data_intervals
        )
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
        is_passed_over = is_skipped(self.state.step + 1, self.config.skip_data_intervals)
        request = self._pass_over() if is_passed_over else self._take_step(micro_batches)
        self.signum = request.signum
        return self._finish_step(request)

    def _pass_over(self) -> Interrupt:
        """A step of `skip_data_intervals`."""
        number = self.state.step + 1
        self.state = replace(self.state, step=number, evaluation={})
        if self.reporters:
            console.say(f"step {number}: its data are passed over (skip_data_intervals)")
        for reporter in self.reporters:
            reporter.advance(number)
        return self._interrupts.agree(False)

    def _take_step(self, micro_batches: Any) -> Interrupt:
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
        self._account(loss, totals, request.nonfinite)
        if profiled:
            self._off_the_clock(lambda: self._telemetry.draw(spans, self.state.step, self.folder.path))
        return request

    def _finish_step(self, request: Interrupt) -> bool:
        """What is due after a step. Returns whether the run ends here."""
        step = self.state.step
        last = step == self.budget.last_step or request.ends
        if step % self.config.logging_steps == 0 or last:
            self._report_interval()
        if self._evaluations and (is_due(step, self._eval_every) or last) and not request.signum:
            self._off_the_clock(self._evaluate)
            if not last and self._has_lost_patience():
                self._report_interval()
                last = True
        if request.ends:
            self.ended_by = f"signal {request.signum}" if request.signum else "STOP"
        elif step < self.budget.total_steps and step == self.budget.last_step:
            self.ended_by = "stop_after_steps"
        if is_due(step, self._save_every) or last or request.save or self._is_best_to_keep():
            self._off_the_clock(self._save)
            self._interrupts.saved()
        return last

    def _has_lost_patience(self) -> bool:
        best, patience = self.state.best, self.config.early_stopping_patience
        if best is None or patience is None or best.evaluations_since < patience:
            return False
        self.ended_by = "early stopping"
        if self.reporters:
            by = f" by more than {threshold:g}" if (threshold := self.config.early_stopping_threshold) else ""
            console.say(
                f"early stopping: {best.metric} has not improved{by} in {best.evaluations_since} evaluations; the best "
                f"is {best.value:.4f} at step {best.step}"
            )
        return True

    def _is_best_to_keep(self) -> bool:
        best = self.state.best
        return self.config.load_best_model_at_end and best is not None and best.step == self.state.step

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
        num_tokens = self.state.num_tokens + totals.num_tokens
        self.state = replace(self.state, step=step + 1, num_tokens=num_tokens, evaluation={})
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
        found, step = self._evaluations.run(), self.state.step
        self.last_eval = {"step": step, **found}
        self._report(self.last_eval)
        check_metric(self._criterion.metric, found, is_main=bool(self.reporters))
        if step > 0:  # what the run has started from is no checkpoint of it
            best = update_best(self.state.best, self._criterion, found, step, self.config.early_stopping_threshold)
            self.state = replace(self.state, evaluation=found, best=best)

    def _save(self) -> None:
        with self._pause_watchdog():
            self._writer.save(self.state)

    def _report(self, record: Record) -> None:
        for reporter in self.reporters:
            reporter.report(record)

    def _off_the_clock(self, work: Callable[[], None]) -> None:
        """Runs `work` without counting its time as training."""
        self._interval.pause()
        work()
        self._interval.resume()
