"""One training run, from a composed config to an exported model. Read this first to see the order of the steps."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from console import report_progress
from data.storage.file_report import save_skipped
from extension import list_actions, load_part
from training.build import build_engine, build_eval_loaders, build_loaders, build_resident, prepare_auxiliary
from training.checkpoint.run_folder import RunFolder
from training.checkpoint.state import TrainerState, load_checkpoint
from training.checkpoint.timeline import announce_start, drop_shared, find_abandoned, record_start, set_aside
from training.config.schema import Init, RunConfig, find_output_dir, is_training, to_typed
from training.disk_space import check_room
from training.distributed import process
from training.distributed.ending import discard_earlier_end, record_end, record_end_in
from training.distributed.interrupts import discard_requests, exit_code, leave_on_signals, noticing_signals
from training.distributed.meeting import watch_meeting
from training.distributed.ranks import Ranks, exit_on_user_error, read_ranks, refuse_exits
from training.distributed.watchdog import Watchdog
from training.evaluate import evaluate_checkpoint
from training.evaluations import Evaluations
from training.export import export_end, export_steps, prepare_folder
from training.export_receiver import ExportReceiver, check_receivers
from training.host_files import check_same_files
from training.inputs.datasets import (
    check_ids,
    find_prompt_template,
    list_trained_stops,
    load_tokenizer,
    tokenize,
)
from training.inputs.loaders import RankData
from training.inputs.step_budget import StepBudget, compute_step_budget, measure_evaluations
from training.loop import TrainingLoop, build_loop
from training.objectives.registry import get_objective
from training.observability.loggers import IsolatedReporter
from training.observability.metrics import Event, Reporter
from training.observability.reporters import open_evaluation_reporters, open_reporters
from training.observability.stage_timer import MemoryPeak, StageTimer
from training.observability.telemetry import Telemetry
from training.planner.prediction import Prediction
from training.scoring.first_pass import build_first_pass
from training.setup import (
    Run,
    check_run,
    describe_identity,
    find_run_machine,
    load_resumed,
    predict_run,
)
from training.summary import RunEnd, RunTotals, list_warnings, show_end, show_evaluation, show_start

# Ranks wait this long for rank 0 of their host to tokenize.
PREPARATION_TIMEOUT = timedelta(hours=12)
_SECONDS_BETWEEN_LOOKS = 0.5  # at uploads
Action = Callable[[RunConfig, Ranks, Collection[str]], None]
"""Takes a config, the ranks before they join, and the keys that the command line gives and the groups that it
chooses."""


def run(composed: Any, given: Collection[str] = ()) -> None:
    """Check everything that is known without weights, then train. A UserError ends the process with one line.
    composed: a DictConfig. given: the keys that the command line gives and the groups that it chooses."""
    ranks = read_ranks()
    process.buffer_library_logs()
    if ranks.is_main and (folder := find_folder(composed)) is not None:
        record_end_in(folder.ended, ranks.rank, folder.claim)
    with exit_on_user_error(ranks, reports=ranks.local_rank == 0):  # hosts may hold other files
        config = to_typed(composed, unread=find_unread(composed))
        if (action := find_action(config)) is not None:
            action(config, ranks, given)
            return
        watch_meeting(ranks, config.start_minutes)
        kinds = check_receivers(config) if ranks.is_main and not config.evaluate_only else ()
        with ranks.phase("checking the run and reading the model's config"):
            setup = check_run(config, ranks, given)
        this_run = Run.of(setup, ranks)
        with ranks.phase("opening what takes the exports"):
            receivers = [*filter(None, (kind.open(config, this_run.folder) for kind in kinds))]
    log = this_run.folder.path / "logs" / f"rank_{ranks.rank}.log"
    process.redirect_output_to_log(log, ranks)
    with exit_on_user_error(ranks, log=log), refuse_exits(), process.touching(log):
        signum = evaluate_only(this_run) if config.evaluate_only else train(this_run, receivers)
        process.leave_process_group()
    if signum:
        sys.exit(exit_code(signum))


def find_unread(composed: Any) -> list[str]:
    """Return the keys without a default that this run does not read."""
    holds_out = any(composed.data.get(key) is not None for key in ("eval_fraction", "eval_samples"))
    unread = {
        "train_file": composed.evaluate_only and not holds_out,
        "model_name_or_path": composed.init is Init.random,
    }
    return [key for key, is_unread in unread.items() if is_unread]


def find_folder(composed: Any) -> RunFolder | None:
    """Return the folder of a run that is to train, by a config that may have mistakes; None where it names
    none, and where something else is run."""
    if not is_training(composed):
        return None
    output_dir = find_output_dir(composed)
    return RunFolder(output_dir) if output_dir else None


def find_action(config: RunConfig) -> Action | None:
    """Return what an extension runs in place of training, where its key is true."""
    places = (place for key, place in list_actions().items() if getattr(config, key))
    return next(map(load_part, places), None)


def train(run: Run, receivers: Sequence[ExportReceiver] = ()) -> int:
    """Join the ranks, build, train and export. Returns the signal that ended the run early, or 0. receivers: those of
    the main rank."""
    ranks, folder = run.ranks, run.folder
    if ranks.is_main:
        folder.acquire_lock()
        discard_requests(folder.path)
        discard_earlier_end(folder.ended)
    record_end_in(folder.ended, ranks.rank)
    with leave_on_signals(ranks):
        tokenizer = prepare_data(run)
        with ranks.phase("measuring this machine"):
            machine = find_run_machine(run.config, ranks) if ranks.is_main else None  # while the other ranks wait
        join_ranks(ranks)
    watchdog = build_watchdog(run)
    with leave_on_signals(ranks, watchdog.leave), watchdog:
        datasets = tokenize(run.config, tokenizer)  # reads the cache
        run = agree_on_setup(run)
        config, setup = run.config, run.setup
        with ranks.phase("comparing what the hosts read"):
            check_same_files(run, datasets, tokenizer)
        budget, start = agree_on_steps(run, datasets, tokenizer)
        if budget.finished:
            ranks.say(f"resume: {budget.finished}")
            if ranks.is_main:
                folder.confirm_completed()
            folder.release_lock()
            return 0
        if ranks.is_main:
            announce_start(folder, config)
        hosts = process.gather_hosts()
        with ranks.phase("planning the step"):
            prediction = predict_run(
                run, machine, train_path=datasets.get("train_file"), num_samples=budget.num_samples,
                steps=range(start.step, budget.last_step),
            )  # fmt: skip
        if setup.recomputation is not None:
            ranks.say(setup.recomputation)
        if prediction is not None:
            show_start(run, datasets=datasets, budget=budget, start=start, prediction=prediction, hosts=hosts)
        process.broadcast_from_main(partial(check_disk, run, prediction), ranks)
        data = prepare_auxiliary(run, RankData(datasets, tokenizer, setup.layout, ranks))
        memory = MemoryPeak(process.current_device())
        resident = build_resident(run)
        engine = build_engine(run, resident=resident)
        loaders = build_loaders(run, engine, data, budget, resident)
        watchdog.limit_collectives()
        if setup.resume_from is not None:
            with ranks.phase("loading the checkpoint's optimizer state"):
                load_checkpoint(engine, setup.resume_from, start)
        totals = RunTotals(start)
        reporters: list[Reporter] = []
        if prediction is not None:
            # Only now: a run that could not start deletes nothing, and sets nothing aside.
            notes = begin_line(run)
            trained_on = datasets.get("train_file")
            stops = list_trained_stops(config, tokenizer, trained_on)
            prepare_folder(run, tokenizer, stops, find_prompt_template(config, tokenizer, trained_on))
            folder.skipped.unlink(missing_ok=True)
            save_skipped(datasets, folder.skipped)
            record_start(folder, config, setup.resume_from, budget.last_step)
            folder.reopen()
            with ranks.phase("opening the loggers"):
                opened = open_reporters(
                    config, prediction, folder=folder, datasets=datasets, budget=budget, first_step=start.step,
                    hosts=hosts,
                )  # fmt: skip
            reporters = [totals, *opened]
            warnings = (Event(start.step, "warning", text) for text in list_warnings(setup, budget.total_steps))
            for event in [*notes, *warnings]:
                for reporter in reporters:
                    reporter.note(event)
        timer = StageTimer(engine, memory, None if resident is None else resident.engine)
        timer.attach()
        telemetry = Telemetry(timer, setup.layout, prediction)
        loop = build_loop(
            run, engine, loaders, budget, start, telemetry=telemetry, reporters=reporters,
            export_steps=partial(export_steps, run, receivers),
        )  # fmt: skip
        watchdog.limit_collectives()  # including those of the loop's group
        with watchdog.following(engine.module):
            loop.run()
        end = conclude(run, loop, telemetry=telemetry, totals=totals, receivers=receivers)
    process.leave_process_group()
    hand_over(loop, end, receivers)
    folder.release_lock()
    return loop.signum


def evaluate_only(run: Run) -> int:
    """Join the ranks, build and evaluate, instead of `train`. Returns 0."""
    ranks, folder, config = run.ranks, run.folder, run.config
    tokenizer = prepare_data(run)
    join_ranks(ranks)
    watchdog = build_watchdog(run)
    with leave_on_signals(ranks, watchdog.leave), watchdog:
        datasets = tokenize(config, tokenizer)
        run = agree_on_setup(run)
        setup = run.setup
        check_same_files(run, datasets, tokenizer)
        sizes = process.broadcast_from_main(lambda: measure_evaluations(config, setup.layout, datasets), ranks)
        hosts = process.gather_hosts()
        reporters: list[Reporter] = []
        if ranks.is_main:
            folder.path.mkdir(parents=True, exist_ok=True)
            save_skipped(datasets, folder.skipped)
            show_evaluation(run, sizes=sizes, datasets=datasets, hosts=hosts)
            reporters = open_evaluation_reporters(config, folder, hosts)
        data = prepare_auxiliary(run, RankData(datasets, tokenizer, setup.layout, ranks))
        resident = build_resident(run)
        engine = build_engine(run, trains=False, resident=resident)
        loaders = build_eval_loaders(run, engine, data, sizes, resident)
        metrics = get_objective(config).metrics(engine.module.loss_fn, engine.device)
        evaluations = Evaluations(engine, loaders, sizes, metrics, build_first_pass(engine, config, resident))
        watchdog.limit_collectives()
        adapter = config.adapter.name_or_path if setup.adapter is not None and setup.resume_from is None else None
        with watchdog.following(engine.module):
            evaluate_checkpoint(
                config, evaluations, source=Path(adapter or setup.source.path), resume_from=setup.resume_from,
                folder=folder, ranks=ranks, reporters=reporters,
            )  # fmt: skip
    return 0


def prepare_data(run: Run) -> PreTrainedTokenizerBase:
    """Return the tokenizer, with which the first rank of each host has tokenized the data; the others do not wait."""
    config, setup, ranks = run.config, run.setup, run.ranks
    # Rank 0 of each host reports: all ranks of a host see the error, other hosts may not.
    with exit_on_user_error(ranks, reports=ranks.local_rank == 0):
        process.find_device(ranks)
    with exit_on_user_error(ranks, reports=ranks.local_rank == 0), ranks.phase("loading the tokenizer"):
        tokenizer = load_tokenizer(config, setup.source)
        if (other := setup.auxiliary) is not None:
            other.model.check_tokenizer(other.setup.source.path, tokenizer)
    if ranks.local_rank == 0:  # the other ranks of the host wait for the process group meanwhile
        with ranks.phase("reading the data"):
            datasets = tokenize(config, tokenizer, ranks.say if ranks.is_main else None, compares_bytes=True)
            check_ids(config, tokenizer, datasets, setup.architecture.vocab_size)
    return tokenizer


def join_ranks(ranks: Ranks) -> None:
    """Take this rank's device, and join the process group."""
    process.take_device(ranks)
    with ranks.phase("waiting for the other ranks"):
        process.join_process_group(PREPARATION_TIMEOUT)


def build_watchdog(run: Run) -> Watchdog:
    """Return the watchdog of a run whose ranks have joined."""
    return Watchdog(
        run.ranks, run.config.stuck_minutes, run.setup.layout.name_rank, grace_seconds=run.config.grace_seconds,
        logs=run.folder.path / "logs",
    )  # fmt: skip


def agree_on_setup(run: Run) -> Run:
    """Return the run with the weights of the checkpoint to resume from, and what follows from the times of passes as
    the main rank has them: the split into stages, the order of passes, and the recomputation of `auto`. Ranks with
    other numbers, such as those of another GPU, would exchange other things, and wait forever. So too for an auxiliary
    model."""
    own, setup = run.config, load_resumed(run.setup, run.ranks.say)
    if (other := setup.auxiliary) is not None:
        agreed = agree_on_setup(replace(run, setup=other.setup)).setup
        setup = replace(setup, auxiliary=replace(other, setup=agreed))
    mode, interval, layout, bounds = process.broadcast_from_main(
        lambda: (own.activation_checkpoint_mode, own.activation_checkpoint_interval, setup.layout, setup.bounds),
        run.ranks,
    )
    config = replace(own, activation_checkpoint_mode=mode, activation_checkpoint_interval=interval)
    return replace(run, setup=replace(setup, config=config, layout=layout, bounds=bounds))


def agree_on_steps(
    run: Run, datasets: dict[str, Path], tokenizer: PreTrainedTokenizerBase
) -> tuple[StepBudget, TrainerState]:
    """Return the length and the start of the run, as counted by the main rank."""
    config, setup, ranks = run.config, run.setup, run.ranks
    with ranks.phase("counting steps and fingerprinting the base model"):
        return process.broadcast_from_main(
            lambda: compute_step_budget(
                config,
                setup.layout,
                datasets,
                setup.resume_from,
                setup.architecture.vocab_size,
                describe_identity(setup, tokenizer),
                tokenizer,
            ),
            ranks,
        )


def check_disk(run: Run, prediction: Prediction | None) -> None:
    """Check that the disk has room for a checkpoint, before weights are read. Raises UserError."""
    assert prediction is not None, "on the main rank"
    check_room(run.config, prediction.plan.checkpoint, run.folder.checkpoints)


def begin_line(run: Run) -> list[Event]:
    """Set aside the steps that the run abandons where it starts, and drop the records of what did not lead there. Main
    rank only. Returns the event of it, if any."""
    folder = run.folder
    abandoned, notes = find_abandoned(folder, run.setup.resume_from), list[Event]()
    if run.config.overwrite_output_dir:
        return notes
    if abandoned:
        place = set_aside(folder, abandoned)
        notes.append(Event(abandoned.first_step, "abandoned", f"set aside in {place}: {abandoned.describe()}"))
    if abandoned.start is None:
        folder.drop_records()
        drop_shared(folder)
    return notes


def conclude(
    run: Run, loop: TrainingLoop, *, telemetry: Telemetry, totals: RunTotals, receivers: Sequence[ExportReceiver]
) -> RunEnd | None:
    """Export the model of a finished run, and show how the run ended. Returns that on the main rank, None on others."""
    for reporter in loop.reporters:
        if not isinstance(reporter, IsolatedReporter):
            reporter.close()
    if summary := telemetry.summarize():
        run.ranks.say(summary)
    if not run.ranks.is_main:
        return None
    state = loop.state
    best = state.best if run.config.load_best_model_at_end else None
    exported = None
    if not loop.signum:
        for receiver in receivers:
            receiver.wait()  # it may be reading hf/
        exported = export_end(run, state.step, None if best is None else best.step)
        chosen = {} if best is None else {"best_step": best.step, "best_metric": best.value}
        evaluation = {"step": state.step, "num_tokens": state.num_tokens, **state.evaluation}
        run.folder.write_completed({**evaluation, **chosen, "ended_by": loop.ended_by})
    records = loop.train_loader.describe_records()
    end = RunEnd(state.step, state.total_steps, loop.ended_by, loop.signum, loop.last_eval, best, exported)
    show_end(run, totals, end, records)
    return end


def hand_over(loop: TrainingLoop, end: RunEnd | None, receivers: Sequence[ExportReceiver]) -> None:
    """Upload the model of a finished run, and close its page and its loggers, which may wait for a network: on the main
    rank, once the others have left. The run stays finished when a signal ends that wait."""
    if end is None:
        return
    if end.signum:
        record_end(exit_code(end.signum), f"stopped by {signal.Signals(end.signum).name}, after a save")
    with noticing_signals() as noticed:
        if end.exported is not None:
            for receiver in receivers:
                receiver.start(end.exported, f"step {end.step if end.best is None else end.best.step}")
        while any(receiver.is_busy for receiver in receivers) and not noticed.wait(_SECONDS_BETWEEN_LOOKS):
            report_progress()
        for receiver in receivers:
            if receiver.is_busy:
                receiver.give_up()
        for reporter in loop.reporters:
            if isinstance(reporter, IsolatedReporter):
                reporter.close()
