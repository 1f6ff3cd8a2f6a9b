"""The loop: one optimizer step after another, with evaluation, saving and reports at their steps."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

import console
from data.loading.step_totals import StepTotals
from data.options import Packing
from errors import UserError
from training.callbacks import Callbacks, RunView
from training.checkpoint.best import describe_patience, has_lost_patience, update_best
from training.checkpoint.retention import Retention
from training.checkpoint.run_folder import RunFolder
from training.checkpoint.state import TrainerState, record_evaluation
from training.checkpoint.writer import CheckpointWriter
from training.collector import Collector
from training.config.criterion import Criterion
from training.config.schema import OnNonfinite, Precision, RunConfig
from training.distributed.interrupts import EvaluationInterrupted, Interrupt, Interrupts, tolerate_dead_workers
from training.distributed.process import make_host_group
from training.distributed.ranks import raise_together
from training.engine.engine import Engine
from training.engine.steps import is_nonfinite
from training.evaluations import Evaluations, check_metric
from training.export_receiver import is_taken
from training.inputs.cadence import is_due, steps_between
from training.inputs.loaders import Loaders
from training.inputs.skipped_data import is_skipped, iterate_trained
from training.inputs.step_budget import StepBudget
from training.inputs.step_totals import STEPS_AT_ONCE, SharedTotals
from training.objectives.objective import Metrics
from training.objectives.registry import choose_packing, get_objective
from training.observability.interval import Interval
from training.observability.metrics import Event, Record, Reporter
from training.observability.nonfinite_probe import NonfiniteProbe, describe_nonfinite
from training.observability.step_trace import StepTrace
from training.observability.telemetry import Telemetry
from training.setup import Run


@dataclass(frozen=True)
class Collaborators:
    """The objects that a training loop works with."""

    engine: Engine
    loaders: Loaders
    totals: SharedTotals
    metrics: Metrics  # of the objective; the evaluations have the same ones
    evaluations: Evaluations
    writer: CheckpointWriter
    interrupts: Interrupts
    callbacks: Callbacks
    probe: NonfiniteProbe
    telemetry: Telemetry
    reporters: Sequence[Reporter] = ()  # empty on all ranks but the main one


def build_loop(
    run: Run,
    engine: Engine,
    loaders: Loaders,
    budget: StepBudget,
    start: TrainerState,
    *,
    telemetry: Telemetry,
    reporters: Sequence[Reporter],
    export_steps: Callable[[int], None],
) -> TrainingLoop:
    """Build the loop of this rank. All ranks call it.

    reporters: as in `Collaborators`. export_steps: is called in the save thread of the main rank with each step that is
    saved.
    """
    config, folder = run.config, run.folder
    group = make_host_group()
    writer = CheckpointWriter(
        engine, folder.checkpoints, Retention.of(config), config.async_save, weights_only=config.save_weights_only,
        export=export_steps,
    )  # fmt: skip
    interrupts = Interrupts(
        folder.path, config.grace_seconds, config.save_minutes, is_main=run.ranks.is_main, group=group
    )
    view = RunView(
        folder.path, engine.rank, engine.layout.world_size, budget.last_step, engine.module, start.step,
        start.num_tokens,
    )  # fmt: skip
    metrics = get_objective(config).metrics(engine.module.loss_fn, engine.device)
    collaborators = Collaborators(
        engine,
        loaders,
        SharedTotals(loaders.train, budget.last_step, group, 1 if config.data.streaming else STEPS_AT_ONCE),
        metrics,
        Evaluations(engine, loaders.evaluation, budget.evaluations, metrics, loaders.first_pass),
        writer,
        interrupts,
        Callbacks(run.setup.callbacks, view, wait_for_save=partial(wait_for_save, writer, interrupts), group=group),
        NonfiniteProbe(engine.module, engine.device),
        telemetry,
        reporters,
    )
    return TrainingLoop(config, folder, budget, start, collaborators)


def wait_for_save(writer: CheckpointWriter, interrupts: Interrupts) -> None:
    """Return when the save that is under way is complete. All ranks call it."""
    with interrupts.saving():
        writer.wait()


class TrainingLoop:
    """The training loop of this rank. Every rank runs the same steps; rank 0, which reads inputs, also reports."""

    def __init__(
        self, config: RunConfig, folder: RunFolder, budget: StepBudget, start: TrainerState, parts: Collaborators
    ) -> None:
        self.config, self.folder, self.budget, self.state = config, folder, budget, start
        self.engine, self.reporters, self.train_loader = parts.engine, parts.reporters, parts.loaders.train
        self._totals, self._metrics, self._evaluations = parts.totals, parts.metrics, parts.evaluations
        self._writer, self._interrupts, self._callbacks = parts.writer, parts.interrupts, parts.callbacks
        self._probe, self._telemetry, self._first_pass = parts.probe, parts.telemetry, parts.loaders.first_pass
        self._trace = StepTrace(config.profile_trace, folder.path)
        self._criterion = Criterion.of(config)
        self._mean_over = get_objective(config).mean_over
        self._counts_samples = choose_packing(config) is Packing.BEST_FIT  # else each step has the same number
        self._interval = Interval(torch.zeros((), dtype=torch.float64, device=parts.engine.device))
        self._eval_every = steps_between(config.eval_steps, config.eval_epochs, len(self.train_loader))
        self._save_every = steps_between(config.save_steps, config.save_epochs, len(self.train_loader))
        self._collector = Collector()
        self.last_eval: Record | None = {"step": start.step, **start.evaluation} if start.evaluation else None
        self.signum = 0  # the signal that ended the run early
        self.ended_by = ""

    def run(self) -> TrainerState:
        """Train to `budget.last_step` or until asked to end, evaluate and save there, and return the final state.

        After a signal the run only saves, and `signum` holds the signal's number.
        """
        if self._lacks_evaluation():
            self._evaluate()
            self._record_evaluation()
        micro_batches = self._iterate(self.train_loader)
        self._first_batches = self._iterate(self.train_loader.first) if self._first_pass is not None else None
        self._interval.start()
        self._interrupts.start()
        self._collector.start()
        if self.state.step:
            self._note("resumed", f"from step {self.state.step}")
        try:
            # A run that died before its export only exports
            self.ended_by = self.ended_by or self._find_end(Interrupt())
            self._stop_early()
            if self.budget.starts_elsewhere and (self._is_final() or self._is_best_to_keep()):
                self._save()  # what the run exports is a checkpoint of its own
            while not self.ended_by:
                skips = is_skipped(self.state.step + 1, self.config.skip_data_intervals)
                request = self._skip_step() if skips else self._take_step(micro_batches)
                self.signum = request.signum
                self._finish_step(request)
            wait_for_save(self._writer, self._interrupts)
            self._notice_signal()
            self._callbacks.finish_save()
            self._callbacks.view.ended_by = self.ended_by
            self._callbacks.call("on_end")
            self._notice_signal()
            self._note("end", self.ended_by)
        finally:
            self._collector.close()
            self._writer.finish()  # this rank may end with an error: a save that is under way ends first
            self.train_loader.close()
            if self.signum:
                self._interrupts.keep_until_exit()
            else:
                self._interrupts.close()
        return self.state

    def _lacks_evaluation(self) -> bool:
        """Returns whether the run evaluates before its first step: at its start, or because a signal kept it from the
        evaluation that was due where it continues."""
        step = self.state.step
        if not self._evaluations or self.state.evaluation:
            return False
        return is_due(step, self._eval_every) or step == self.budget.last_step if step else self.config.eval_on_start

    def _iterate(self, loader: Any) -> Any:
        return iterate_trained(loader, self.state.step, self.budget.last_step, self.config.skip_data_intervals)

    def _skip_step(self) -> Interrupt:
        """Count a step of `skip_data_intervals` without training on its data."""
        number = self.state.step + 1
        self.state = replace(self.state, step=number, evaluation={})
        self._note("skipped", f"step {number}: data skipped (skip_data_intervals)", shown=True)
        for reporter in self.reporters:
            reporter.advance(number)
        return self._interrupts.agree(False)

    def _take_step(self, micro_batches: Any) -> Interrupt:
        number = self.state.step + 1
        profiled, traced = number == self.config.profile_step, number == self.config.profile_trace
        totals = self._totals.get(self.state.step)
        if traced:
            self._untimed(self._trace.start)
        self._telemetry.start_step(profiled)
        if self._first_pass is not None:
            accumulated = self.engine.layout.gradient_accumulation_steps
            self._first_pass.prepare(self._first_batches, accumulated, totals.num_samples)
        loss, self._learning_rate = self.engine.train_step(
            micro_batches, self.state.step, self.budget.total_steps, totals, is_last=number == self.budget.last_step
        )
        request = self._interrupts.agree(is_nonfinite(self.engine, loss))
        spans = self._telemetry.finish_step()
        if traced:
            self._untimed(self._trace.finish)
        self._account(loss, totals, request.nonfinite)
        if profiled:
            self._untimed(lambda: self._telemetry.draw(spans, self.state.step, self.folder.path))
            self._note("picture", f"step_{self.state.step}.png")
        return request

    def _finish_step(self, request: Interrupt) -> None:
        """Report, evaluate and save where they are due after a step, which may end the run."""
        step = self.state.step
        self._collector.finish_step(step)
        self.ended_by = self._find_end(request)
        if step % self.config.logging_steps == 0 or self.ended_by:
            self._report_interval()
        asks_to_save = False
        if self._callbacks:
            view = self._callbacks.view
            view.step, view.num_tokens = step, self.state.num_tokens
            self._untimed(partial(self._callbacks.announce_save, self._writer.is_writing))
            self._untimed(partial(self._callbacks.call, "on_step"))
            asks_to_save = self._handle_requests()
        if self._evaluations and (is_due(step, self._eval_every) or self.ended_by) and not request.signum:
            self._untimed(self._evaluate)
            asks_to_save |= self._handle_requests()
            self._notice_signal()
        if self.ended_by:
            tolerate_dead_workers()  # no further step needs one
            self._report_interval()  # where an evaluation or a callback has ended the run
        is_asked = request.save or asks_to_save or self._is_best_to_keep()
        if is_due(step, self._save_every) or self._is_final() or is_asked or self._is_exported(step):
            self._untimed(self._save)
            self._interrupts.saved()
            self._notice_signal()

    def _is_final(self) -> bool:
        """Returns whether the run ends with this step and saves it for that."""
        return bool(self.ended_by) and (self.config.save_final or bool(self.signum))

    def _find_end(self, request: Interrupt) -> str:
        """Return why the run ends with this step; empty when it continues."""
        if request.ends:
            return signal.Signals(request.signum).name if request.signum else "STOP"
        if self.state.step < self.budget.last_step:
            return ""
        return "the last step" if self.budget.last_step == self.budget.total_steps else "stop_after_steps"

    def _notice_signal(self) -> None:
        """End the run with this step when a signal has arrived during an evaluation, a save or a callback."""
        self.signum = self._interrupts.agree_on_signal()
        if self.signum:
            self.ended_by = signal.Signals(self.signum).name

    def _handle_requests(self) -> bool:
        """Return whether a callback has asked for a save; end the run with this step when one has asked to stop."""
        asks_to_stop, asks_to_save = self._callbacks.take_requests()
        if asks_to_stop:
            self.ended_by = self.ended_by or "a callback"
        return asks_to_save

    def _stop_early(self) -> None:
        best = self.state.best
        if self.ended_by or best is None or not has_lost_patience(best, self.config.early_stopping_patience):
            return
        self.ended_by = "early stopping"
        patience = describe_patience(best, self.config.early_stopping_threshold)
        self._note("warning", f"early stopping: {patience}", shown=True)

    def _is_best_to_keep(self) -> bool:
        best = self.state.best
        return self.config.load_best_model_at_end and best is not None and best.step == self.state.step

    def _account(self, loss: torch.Tensor, totals: StepTotals, nonfinite: bool) -> None:
        """Count the step. Raises UserError on all ranks for a step that is not finite, unless on_nonfinite=skip."""
        step = self.state.step
        if nonfinite:
            self._report_nonfinite(step, loss)
        self._probe.reset()
        self._metrics.add_step(counts=not nonfinite)
        if self.reporters:
            self._interval.add(totals.num_tokens, totals.num_samples)
            if not nonfinite:
                self._interval.add_loss(loss, totals.count_terms(self._mean_over))
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
            samples, norm = self.train_loader.name_samples(step), float(self.engine.gradient_norm())
            text = describe_nonfinite(step + 1, loss.item(), norm, samples=samples, place=place)
            if self.config.on_nonfinite is OnNonfinite.skip:
                self._note("skipped", f"skipped {text}", shown=True)
            else:
                error = UserError(
                    f"{text}. Neither weights nor checkpoints include this step; check the samples or lower "
                    "learning_rate, and continue with resume=auto; on_nonfinite=skip skips such steps"
                )
        if self.config.on_nonfinite is OnNonfinite.stop:
            wait_for_save(self._writer, self._interrupts)
            raise_together(error)

    def _report_interval(self) -> None:
        measured = self._telemetry.gather()  # a collective
        metrics = self._metrics.finish_interval()
        routers = self.engine.module.routers
        routed = routers.finish_interval() if routers is not None else {}
        if not self.reporters or self._interval.is_empty or measured is None:
            return
        grad_norm, skipped = self._interval.grad_norm, self._describe_skipped()
        loss, tokens_per_second, step_time, samples = self._interval.finish()
        self._report(
            {
                "step": self.state.step,
                "loss": loss,
                **metrics,
                **routed,
                "grad_norm": None if grad_norm is None else float(grad_norm),
                "learning_rate": self._learning_rate,
                "num_tokens": self.state.num_tokens,
                **({"samples_per_step": samples} if self._counts_samples else {}),
                "tokens_per_second": tokens_per_second,
                "step_time": step_time,
                **skipped,
                **self._telemetry.describe(measured, tokens_per_second, step_time),
            }
        )

    def _describe_skipped(self) -> Record:
        """Return the steps skipped since the last report and, in fp16, the loss scale; empty when none can be
        skipped."""
        scaler = self.engine.read_loss_scaler() if self.config.precision is Precision.fp16 else {}
        skips = scaler or self.config.on_nonfinite is OnNonfinite.skip
        counted = {"skipped_steps": self._interval.num_skipped} if skips else {}
        return counted | ({"loss_scale": scaler["cur_scale"]} if scaler else {})

    def _evaluate(self) -> None:
        self._collector.free()
        try:
            found, step = self._evaluations.run(self._interrupts.check_evaluation), self.state.step
        except EvaluationInterrupted:
            return  # the run ends with this step
        self.last_eval = {"step": step, **found}
        self._report(self.last_eval)
        check_metric(self._criterion.metric, found, is_main=bool(self.reporters))
        if step > 0:  # step 0 has no checkpoint
            best = update_best(self.state.best, self._criterion, found, step, self.config.early_stopping_threshold)
            self.state = replace(self.state, evaluation=found, best=best)
            self._stop_early()
        self._callbacks.call("on_evaluate", self.last_eval)

    def _record_evaluation(self) -> None:
        """Record the evaluation of the step that the run resumes from in its checkpoint."""
        step_dir = self.folder.find_checkpoint(self.state.step)
        if self.reporters and self.state.evaluation and not self.budget.starts_elsewhere:
            record_evaluation(step_dir, self.state)

    def _is_exported(self, step: int) -> bool:
        return step in self.config.export_steps or is_taken(self.config, step)

    def _save(self) -> None:
        self._collector.free()
        self._callbacks.finish_save()  # the previous one
        position = self.train_loader.describe_position(self.state.step)
        with self._interrupts.saving():
            self._writer.save(replace(self.state, stream=self.state.stream | position))
        self._callbacks.expect_save(self.folder.checkpoints / f"global_step{self.state.step}")
        self._note("save", f"global_step{self.state.step}")

    def _report(self, record: Record) -> None:
        if self.reporters:
            self._callbacks.view.record = record
        for reporter in self.reporters:
            reporter.report(record)

    def _note(self, kind: str, text: str, shown: bool = False) -> None:
        """Pass an event to the reporters. shown: print its text too, on the main rank."""
        if shown and self.reporters:
            console.say(text)
        for reporter in self.reporters:
            reporter.note(Event(self.state.step, kind, text))

    def _untimed(self, work: Callable[[], None]) -> None:
        """Run `work` without counting its time as training."""
        self._interval.pause()
        work()
        self._interval.resume()
