"""One training run, from a composed config to an exported model. Read this first to see the order of things."""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

import deepspeed
from deepspeed import comm as dist
from omegaconf import DictConfig, OmegaConf
from transformers import PreTrainedTokenizerBase

from console import show_panel
from training.checkpoint.resume import choose_whole
from training.checkpoint.run_folder import RunFolder
from training.checkpoint.state import TrainerState, load_checkpoint
from training.config.precision import DTYPES
from training.config.schema import Device, Init, RunConfig, to_typed
from training.config.validate import check_config
from training.distributed.interrupts import exit_code
from training.distributed.process import (
    buffer_library_logs,
    choose_interface,
    current_device,
    describe_device,
    has_accelerator,
    redirect_output_to_log,
    take_device,
)
from training.distributed.ranks import Ranks, exit_on_user_error, read_ranks
from training.distributed.watchdog import Watchdog
from training.engine.pipeline_engine import initialize_engine
from training.evaluate import evaluate_checkpoint
from training.export import export, prepare_folder
from training.inputs.datasets import load_tokenizer, tokenize
from training.inputs.inspection import print_inspection
from training.inputs.loaders import build_loaders, build_options
from training.inputs.step_budget import StepBudget, compute_step_budget, measure_evaluation
from training.loop import TrainingLoop
from training.objectives.reference_logprobs import prepare_reference
from training.objectives.user_loss import build_run_loss
from training.observability.environment import describe_environment
from training.observability.loggers import build_loggers
from training.observability.metrics import MetricsFile, ProgressBar, Reporter
from training.observability.stage_timer import MemoryPeak, StageTimer
from training.observability.telemetry import Telemetry
from training.pipeline.module import StageModule, join_tensor_parallel
from training.planner.hardware import Machine
from training.planner.prediction import Prediction, find_machine, predict
from training.planner.report import list_figures, render_plan
from training.setup import RunSetup, check_run, load_resumed, open_source
from training.summary import RunTotals, describe_end, describe_evaluation_run, describe_start

T = TypeVar("T")
# Ranks wait this long for rank 0 of their host to tokenize.
PREPARATION_TIMEOUT = timedelta(hours=12)


def run(composed: DictConfig) -> None:
    """Checks everything that can be known, then trains. A UserError ends the process with one line."""
    ranks = read_ranks()
    buffer_library_logs()
    with exit_on_user_error(ranks, speaks=ranks.is_main):
        config = to_typed(composed, unread=find_unread(composed))
        if config.evaluate_only:
            config = replace(config, train_file=None)
        if config.inspect_data:
            inspect_data(config, ranks)
            return
        plan = check_run(config, ranks)
    folder = RunFolder(config.output_dir)
    log = folder.path / "logs" / f"rank_{ranks.rank}.log"
    redirect_output_to_log(log, ranks)
    with exit_on_user_error(ranks, log=log):
        signum = (
            evaluate_only(config, plan, folder, ranks) if config.evaluate_only else train(config, plan, folder, ranks)
        )
        dist.destroy_process_group()
    if signum:
        sys.exit(exit_code(signum))


def find_unread(composed: DictConfig) -> list[str]:
    """The keys without a default that this run does not read."""
    unread = {"train_file": composed.evaluate_only, "model_name_or_path": composed.init is Init.random}
    return [key for key, is_unread in unread.items() if is_unread]


def inspect_data(config: RunConfig, ranks: Ranks) -> None:
    """Tells what the model will see. One process is enough: no layout, device or process group is asked for. Raises UserError."""
    if not ranks.is_main:
        return
    check_config(config, has_accelerator=True)
    tokenizer = load_tokenizer(config, open_source(config, None))
    print_inspection(config, tokenize(config, tokenizer, ranks.say), tokenizer)


def train(config: RunConfig, plan: RunSetup, folder: RunFolder, ranks: Ranks) -> int:
    """The run itself: prepare the data, join the ranks, build the stage, train, export. Returns the signal that ended it early, or 0."""
    if ranks.is_main:
        folder.take()
    machine = (
        find_machine(config.hardware, describe_device(), config, ranks.local_size) if ranks.is_main else None
    )  # while all cores are ours
    tokenizer = join_ranks(config, plan, ranks)
    with Watchdog(ranks, config.stuck_minutes) as watchdog:
        signum = train_together(config, plan, folder, ranks, tokenizer, machine, watchdog)
    folder.release()
    return signum


def evaluate_only(config: RunConfig, plan: RunSetup, folder: RunFolder, ranks: Ranks) -> int:
    """Instead of `train`."""
    tokenizer = join_ranks(config, plan, ranks)
    with Watchdog(ranks, config.stuck_minutes):
        datasets = tokenize(config, tokenizer)
        if plan.resumable is not None:
            plan = load_resumed(plan, choose_whole(plan.resumable, ranks.say), config)
        size = broadcast_from_main(lambda: measure_evaluation(config, datasets["eval_file"]), ranks)
        hosts = gather_hosts()
        reporters: list[Reporter] = []
        if ranks.is_main:
            folder.path.mkdir(parents=True, exist_ok=True)
            facts = describe_evaluation_run(config, plan, size.rows, datasets, hosts)
            show_panel(f"{folder.path.name}: evaluating on {ranks.world_size} ranks", facts)
            reporters = build_loggers(config.logger, folder.path, describe_run(config, hosts), first_step=None)
        evaluate_checkpoint(config, plan, datasets, size, tokenizer, folder, ranks, reporters)
    return 0


def join_ranks(config: RunConfig, plan: RunSetup, ranks: Ranks) -> PreTrainedTokenizerBase:
    """Tokenizes, once a host, takes this rank's device, and waits for the other ranks."""
    with exit_on_user_error(ranks, speaks=ranks.is_main):
        tokenizer = load_tokenizer(config, plan.source)
    if ranks.local_rank == 0:
        tokenize(
            config, tokenizer, ranks.say if ranks.is_main else None
        )  # the other ranks of the host wait for the process group meanwhile
    take_device(ranks)
    choose_interface()
    deepspeed.init_distributed(timeout=PREPARATION_TIMEOUT)
    dist.barrier()
    return tokenizer


def train_together(
    config: RunConfig, plan: RunSetup, folder: RunFolder, ranks: Ranks, tokenizer: PreTrainedTokenizerBase,
    machine: Machine | None, watchdog: Watchdog,
) -> int:  # fmt: skip
    """The part of a run in which no rank may be missing. machine: what is known of it, on the main rank. Returns as `train`."""
    datasets = tokenize(config, tokenizer)  # finds it done
    if plan.resumable is not None:
        plan = load_resumed(plan, choose_whole(plan.resumable, ranks.say), config)
    plan = replace(
        plan, bounds=broadcast_from_main(lambda: plan.bounds, ranks)
    )  # cards that are not alike may hold other layers
    horizon, start = broadcast_from_main(
        lambda: compute_step_budget(config, plan.layout, datasets, plan.resume_from), ranks
    )
    hosts = gather_hosts()
    expectation = None
    if ranks.is_main:
        expectation = predict_run(config, plan, machine, ranks)
        facts = describe_start(config, plan, horizon, start, datasets, expectation, hosts)
        show_panel(f"{folder.path.name}: training on {ranks.world_size} ranks", facts)

    memory = MemoryPeak(current_device())
    parallel = join_tensor_parallel(plan.layout, ranks.rank)
    module = StageModule(
        plan.layers, plan.bounds, plan.source, DTYPES[config.precision], config.activation_checkpoint_interval, plan.adapter, config.freeze,
        loss=build_run_loss(config, plan.source.config, parallel), checkpoint_mode=config.activation_checkpoint_mode, compiles=config.compile,
        parallel=parallel, num_chunks=plan.layout.num_chunks,
    )  # fmt: skip
    engine = initialize_engine(module, config, plan.layout)
    reference = {}
    if plan.reference is not None:
        options = build_options(config, plan.layout, module, tokenizer, ranks)
        reference = prepare_reference(engine, config, datasets, options, plan.reference, plan.source, ranks)
    watchdog.limit_collectives()
    if plan.resume_from is not None:
        load_checkpoint(engine, plan.resume_from, start)
    train_loader, eval_loader = build_loaders(
        config, plan.layout, datasets, horizon, module, tokenizer, ranks, reference
    )
    totals = RunTotals(start)
    reporters: list[Reporter] = []
    if expectation is not None:
        if config.overwrite_output_dir:
            folder.clear()  # only now: a run that could not start has deleted nothing
        prepare_folder(config, plan.source, tokenizer, folder, plan.adapter)
        reporters = [totals, *open_reporters(config, expectation, machine, folder, horizon, start, hosts)]

    clock = StageTimer(engine, memory)
    clock.attach()
    telemetry = Telemetry(clock, plan.layout, expectation)
    loop = TrainingLoop(
        engine, train_loader, eval_loader, config, horizon, start, folder, reporters, telemetry, watchdog.paused
    )
    with watchdog.watching(module):
        state = loop.run()
    for reporter in reporters:
        reporter.close()
    if summary := telemetry.summarize():
        ranks.say(summary)
    if ranks.is_main:
        conclude(plan, folder, state, loop, totals)
    return loop.signum


def predict_run(config: RunConfig, plan: RunSetup, machine: Machine | None, ranks: Ranks) -> Prediction:
    """What to expect of the run. machine: None when no file describes it."""
    if machine is None:
        ranks.say(f"no file of conf/hardware describes {describe_device()!r}; MFU is left out")
    device = Device.cuda if has_accelerator() else Device.cpu
    return predict(config, plan.source.config, plan.bounds, plan.layout, machine, device)


def open_reporters(
    config: RunConfig,
    expectation: Prediction,
    machine: Machine | None,
    folder: RunFolder,
    horizon: StepBudget,
    start: TrainerState,
    hosts: list[str],
) -> list[Reporter]:
    """The run's own file, its loggers, which hear of the plan too, and the bar. Main rank only."""
    known = describe_run(config, hosts)
    if machine is not None:  # else the plan's times are another machine's
        text = render_plan(expectation.plan, config, expectation.hardware, horizon.total_steps)
        folder.plan.write_text(text + "\n")
        known |= {"plan": list_figures(expectation.plan), "plan_table": text}
    loggers = build_loggers(config.logger, folder.path, known, start.step)
    return [MetricsFile(folder.metrics, start.step), *loggers, ProgressBar(start.step, horizon.last_step)]


def conclude(plan: RunSetup, folder: RunFolder, state: TrainerState, loop: TrainingLoop, totals: RunTotals) -> None:
    """Exports what a finished run has made, and says how it ended. Main rank only."""
    if loop.signum:
        title = f"stopped by {signal.Signals(loop.signum).name} at step {state.step}; continue with resume=latest"
    else:
        export(plan, folder)
        folder.write_completed({"step": state.step, "num_tokens": state.num_tokens, **(loop.last_eval or {})})
        title = f"done: {state.step} steps"
    show_panel(title, describe_end(totals, plan, folder, state.step, loop.last_eval, finished=not loop.signum))


def describe_run(config: RunConfig, hosts: list[str]) -> dict[str, Any]:
    """For a logger, and whoever looks at the run later."""
    return {
        "config": OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True),
        "environment": describe_environment(hosts),
    }


def broadcast_from_main(compute: Callable[[], T], ranks: Ranks) -> T:
    """What rank 0 computes, on every rank: numbers on which all must agree, or they hang."""
    told: list[Any] = [compute() if ranks.is_main else None]
    dist.broadcast_object_list(told, src=0)
    return told[0]


def gather_hosts() -> list[str]:
    """The name of each rank's host."""
    hosts = [""] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    return hosts
