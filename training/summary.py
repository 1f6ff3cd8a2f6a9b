"""The panels at the start and at the end of a run, fact by fact. Main rank only."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from transformers import PretrainedConfig

from console import pluralize, say, show_panel
from data.encoders.kinds import find_kind
from data.options import Packing
from data.storage.file_report import describe_files
from data.storage.rows import Rows
from data.storage.tokenized import load_summary
from formatting import render_bytes, render_count, render_seconds
from models.adapters.options import AdapterName
from models.adapters.targets import describe_targets
from models.architecture.lookup import warn_of_length
from models.experts.sizes import count_experts
from models.heads.table import find_head
from models.weights.passthrough import find_passthrough, render_mib
from models.weights.source import WeightSource
from training.checkpoint.best import Best
from training.checkpoint.state import TrainerState
from training.checkpoint.timeline import find_abandoned
from training.config.schema import CheckpointMode, Init, RunConfig
from training.config.sources import list_evaluations
from training.costs.hardware import GIB
from training.disk_space import measure_passthrough, render_disk
from training.inputs.cadence import describe_cadence
from training.inputs.datasets import build_row_plan, list_entries
from training.inputs.skipped_data import count_trained
from training.inputs.step_budget import EvalSize, StepBudget
from training.observability.metrics import Record, Reporter, describe_evaluation
from training.optim.lr_schedule import warn_of_warmup
from training.pipeline.schedules import build_schedule
from training.planner.prediction import Prediction
from training.setup import Run, RunSetup

Facts = dict[str, str]


def show_start(
    run: Run,
    *,
    datasets: dict[str, Path],
    budget: StepBudget,
    start: TrainerState,
    prediction: Prediction,
    hosts: Sequence[str],
) -> None:
    """Show what became of each file, and the panel of a run that trains. datasets: key -> tokenized folder. hosts: the
    host of each rank."""
    config, setup = run.config, run.setup
    if datasets:
        show_panel(f"{Path(config.output_dir).name}: data", describe_files(datasets))
    facts = {"model": _describe_model(setup, prediction), "data": _describe_training_data(config, datasets, budget)}
    facts |= describe_wrapper(setup.source, config.data.name) | describe_unused(setup.source, config)
    if (other := setup.auxiliary) is not None:
        facts[other.model.name] = f"{other.setup.architecture.model_type}, from {other.setup.source.path}"
    facts |= describe_adapter(setup)
    if warnings := list_warnings(setup, budget.total_steps):
        facts["warning"] = "; ".join(warnings)
    if budget.evaluations:
        when = describe_cadence(config.eval_steps, config.eval_epochs)
        facts["evaluation"] = f"{_describe_evaluations(config, datasets, budget.evaluations)}; {when}"
    facts |= describe_layout(setup, hosts, prediction.plan.sent_in_passes)
    facts["steps"] = f"{start.step} to {budget.last_step} of {budget.total_steps}{_describe_epochs(budget, setup)}"
    facts |= _describe_rows(setup, datasets, budget, prediction)
    if prediction.is_known:  # else the plan's times are those of another machine
        seconds = prediction.plan.step_seconds
        left = count_trained(start.step, budget.last_step, config.skip_data_intervals)
        facts["expected"] = f"{render_seconds(seconds)} a step, {render_seconds(left * seconds)} in all, by the plan"
    attention = setup.architecture._attn_implementation
    facts["precision"] = f"{config.precision.value}; {_describe_recomputation(config)}; attention {attention}"
    facts["memory"] = _describe_memory(prediction)
    passthrough = measure_passthrough(setup.source, config)
    size = replace(prediction.plan.checkpoint, passthrough=passthrough)
    facts["on disk"] = render_disk(size, config, budget.last_step)
    facts["output"] = f"{config.output_dir} (metrics.jsonl, checkpoints/, logs/; hf/ at the end)"
    if setup.resume_from is not None:
        facts["resumed from"] = str(setup.resume_from)
    facts |= describe_abandoned(run)
    show_panel(f"{Path(config.output_dir).name}: training on {setup.layout.describe_ranks()}", facts)


def describe_abandoned(run: Run) -> Facts:
    """Return what the run sets aside before its first step; empty if that is nothing."""
    abandoned = find_abandoned(run.folder, run.setup.resume_from)
    if run.config.overwrite_output_dir or not abandoned:
        return {}
    size, place = render_bytes(abandoned.measure()), run.folder.abandoned
    return {"set aside": f"in {place}: {abandoned.describe()} ({size}, which rm -r {place} frees)"}


def show_evaluation(
    run: Run, *, sizes: Mapping[str, EvalSize], datasets: dict[str, Path], hosts: Sequence[str]
) -> None:
    """Show the panels of a run that only evaluates. See `show_start`."""
    config, setup = run.config, run.setup
    show_panel(f"{Path(config.output_dir).name}: data", describe_files(datasets))
    facts = {
        "model": _describe_model(setup),
        **describe_wrapper(setup.source, config.data.name),
        "data": _describe_evaluations(config, datasets, sizes),
        **describe_adapter(setup),
        **describe_layout(setup, hosts),
        "precision": f"{config.precision.value}; attention {setup.architecture._attn_implementation}",
        "output": f"{config.output_dir}/evaluation.json",
    }
    if setup.unread:
        facts["warning"] = "; ".join(setup.unread)
    show_panel(f"{Path(config.output_dir).name}: evaluating on {setup.layout.describe_ranks()}", facts)


def list_warnings(setup: RunSetup, total_steps: int) -> list[str]:
    """Return what is known at the start of a run and does not end it, but may be a mistake."""
    config = setup.config
    found = [
        warn_of_length(setup.architecture, config.max_seq_length),
        warn_of_warmup(total_steps, config),
        warn_of_indexers(setup.architecture, config),
    ]
    return [*filter(None, found), *setup.unread]


def warn_of_indexers(architecture: PretrainedConfig, config: RunConfig) -> str:
    """Return a warning where random indexers, which no run trains, choose keys; empty otherwise."""
    selected = getattr(architecture, "index_topk", None)
    if config.init is not Init.random or selected is None or config.max_seq_length <= selected:
        return ""
    return (
        f"init=random: the indexers are random too and are not trained, so a query attends to {selected:,} keys that "
        "nothing has chosen; begin with published weights"
    )


def describe_layout(setup: RunSetup, hosts: Sequence[str], sent: Mapping[str, float] | None = None) -> Facts:
    """Return the facts about stages and hosts. sent: see `Layout.describe_placement`."""
    per = "layers per chunk" if setup.layout.num_chunks > 1 else "layers per stage"
    facts = {"layout": setup.layout.describe(), per: str([stop - start for start, stop in pairwise(setup.bounds)])}
    if len(set(hosts)) > 1:
        boundaries = build_schedule(setup.layout).list_boundaries()
        facts["hosts"] = setup.layout.describe_placement(list(hosts), boundaries, sent)
    return facts


def _describe_model(setup: RunSetup, prediction: Prediction | None = None) -> str:
    sizes = ""
    if prediction is not None:
        total, trained = prediction.plan.count("whole"), prediction.plan.count("whole_trained")
        sizes = f" of {render_count(total)} parameters{_describe_experts(setup, prediction)}" + (
            f", {render_count(trained)} of them trained" if trained < total else ""
        )
    return f"{setup.architecture.model_type}{sizes}, from {setup.source.path}"


def _describe_experts(setup: RunSetup, prediction: Prediction) -> str:
    active, num_experts = count_experts(setup.architecture)
    if num_experts == 1:
        return ""
    return f" ({num_experts} experts, {active} active: {render_count(prediction.plan.count('active'))} parameters)"


def describe_wrapper(source: WeightSource, data: str = "") -> Facts:
    """Return, for a wrapped model, that only its text model is trained and what is not. data: the kind of data."""
    if source.wrapper is None:
        return {}
    outside = find_passthrough(source, export_unused=False).kept
    if data and find_kind(data).front:
        return {
            "images": f"read by {source.wrapper.name}; its {len(outside)} tensors around the text model "
            f"({render_mib(outside)}) stay as they are, on the first stage"
        }
    return {
        "text only": f"the text model of {source.wrapper.name}; its other {len(outside)} tensors "
        f"({render_mib(outside)}) are passed through unchanged"
    }


def describe_unused(source: WeightSource, config: RunConfig) -> Facts:
    """Return what a run does with weights that no layer reads; empty where there are none."""
    unused = find_passthrough(source).describe_unused()
    if not unused:
        return {}
    if config.adapter.name is not AdapterName.none:
        return {"not trained": f"{unused} stay in the base model"}
    fate = "are passed through unchanged" if config.export_unused else "are left out (export_unused=false)"
    return {"not trained": f"{unused} {fate}"}


def describe_adapter(setup: RunSetup) -> Facts:
    """Return what has adapters, and the form of the frozen weights where that is not the run's precision; empty without
    an adapter."""
    if setup.adapter is None:
        return {}
    targets, form = describe_targets(setup.layers, setup.adapter.config), setup.adapter.form
    return {"adapter": targets if form is None else f"{targets}; frozen weights in {form}"}


def _describe_epochs(budget: StepBudget, setup: RunSetup) -> str:
    if budget.stream is not None:
        return ""
    epochs = budget.total_steps * setup.layout.global_batch_size / budget.num_samples
    return f", {epochs:.3g} {'epoch' if epochs == 1 else 'epochs'}"


def _describe_rows(setup: RunSetup, datasets: Mapping[str, Path], budget: StepBudget, prediction: Prediction) -> Facts:
    """Return how long the rows of `train_file` are, how much of them is padding, and what a step holds of packed ones;
    empty where the data are streamed."""
    if budget.stream is not None:
        return {}
    padded, plan = prediction.plan.run.config.max_seq_length, build_row_plan(setup.config, "train_file")
    text = f"{padded:,} tokens on average, {1 - prediction.filled / padded:.1%} of them padding"
    if plan.packing is Packing.BEST_FIT:
        rows = Rows(datasets["train_file"], plan, False, False)
        per_row = rows.num_pieces / plan.group_size / len(rows)
        text += f"; about {per_row * setup.layout.global_batch_size:,.0f} {setup.objective.unit} in a step"
    return {"rows": text}


def _describe_training_data(config: RunConfig, datasets: dict[str, Path], budget: StepBudget) -> str:
    stream = budget.stream
    if stream is None:
        return _describe_data(config, "train_file", datasets, budget.num_samples)
    entries, position = list_entries(config, "train_file"), stream.cursor.position
    named = entries[0] if len(entries) == 1 else f"{entries[0]} and {len(entries) - 1} more"
    where = f", from shard {position.shard + 1} of pass {position.pass_number + 1} on" if stream.first_step else ""
    return f"{named}: streamed from {pluralize(len(stream.shards), 'shard')}{where}"


def _describe_data(config: RunConfig, key: str, datasets: dict[str, Path], num_rows: int) -> str:
    entries, summary = list_entries(config, key), load_summary(datasets[key])
    named = entries[0] if len(entries) == 1 else f"{entries[0]} and {len(entries) - 1} more"
    rows = f" in {num_rows:,} packed {'row' if num_rows == 1 else 'rows'}" if config.data.packing else ""
    return f"{named}: {pluralize(summary.num_samples, 'sample')}, {render_count(summary.num_tokens)} tokens{rows}"


def _describe_evaluations(config: RunConfig, datasets: dict[str, Path], sizes: Mapping[str, EvalSize]) -> str:
    return "; ".join(
        f"{name}: {text}" if name else text
        for name, key in list_evaluations(config).items()
        for text in [_describe_data(config, key, datasets, sizes[name].rows)]
    )


def _describe_recomputation(config: RunConfig) -> str:
    interval, mode = config.activation_checkpoint_interval, config.activation_checkpoint_mode
    if interval == 0:
        return "all activations kept"
    where = ", their inputs on the host" if config.activation_offload else ""
    if mode is CheckpointMode.grouped:
        groups = "layer by layer" if interval == 1 else f"in groups of {interval} layers"
        return f"activations recomputed {groups}{where}"
    return f"activations recomputed (interval {interval}, {mode.value}){where}"


def _describe_memory(prediction: Prediction) -> str:
    most = max(prediction.peak_memory)
    limit = f" of {prediction.plan.memory_limit / GIB:.1f}" if prediction.is_known else ""
    return f"{most / GIB:.2f}{limit} GiB per rank expected on stage {prediction.peak_memory.index(most)}, the fullest"


class RunTotals(Reporter):
    """A reporter that keeps the totals for the panel at the end."""

    def __init__(self, start: TrainerState) -> None:
        self._start, self._num_tokens, self._began = start, start.num_tokens, time.monotonic()
        self._num_steps, self._seconds = 0, 0.0
        self._first: Record | None = None
        self._last: Record | None = None

    def report(self, record: Record) -> None:
        if "loss" in record:
            seconds = (record["num_tokens"] - self._num_tokens) / record["tokens_per_second"]
            self._seconds += seconds
            self._num_steps += round(seconds / record["step_time"])  # without those whose data were skipped
            self._num_tokens, self._last = record["num_tokens"], record
            self._first = self._first or record

    def describe(self) -> Facts:
        """Return steps, tokens, time and loss; empty when no step was reported."""
        if self._last is None:
            return {}
        tokens = self._num_tokens - self._start.num_tokens
        whole, rate = render_seconds(time.monotonic() - self._began), tokens / self._seconds
        return {
            "trained": f"{pluralize(self._num_steps, 'step')}, {render_count(tokens)} tokens, {rate:,.0f} tokens/s",
            "time": f"{whole}, {render_seconds(self._seconds)} of it in steps",
            "loss": f"{self._last['loss']:.4f} at step {self._last['step']}",
        }

    def summarize(self, model: str, ranks: str, evaluation: str) -> list[str]:
        """Return the run in two lines, for a message to somebody; none when no step was reported. model: its type.
        ranks: their number, in words. evaluation: the last one, in words; empty without one."""
        if self._first is None or self._last is None:
            return []
        facts = self.describe()
        losses = f"loss {self._first['loss']:.3f} -> {self._last['loss']:.3f}"
        evaluated = f", {evaluation}" if evaluation else ""
        return [f"{model}: {facts['trained']} on {ranks} in {facts['time'].partition(',')[0]}", f"{losses}{evaluated}"]


@dataclass(frozen=True)
class RunEnd:
    """How a run ended.

    step: the last one. total_steps: those of the schedule. ended_by: the reason, in words. signum: the signal that
    ended it early; 0 without one. last_eval: the last evaluation. best: the evaluation whose checkpoint is exported in
    place of the last step; None if that is the last step's. exported: the folder of the model; None if there is none.
    """

    step: int
    total_steps: int
    ended_by: str
    signum: int = 0
    last_eval: Record | None = None
    best: Best | None = None
    exported: Path | None = None

    def describe(self, is_saved: bool) -> str:
        """Return the title of the panel. is_saved: whether there is a checkpoint of the last step."""
        if self.signum:
            how = "continue with resume=latest" if is_saved else "it is not saved; continue with resume=auto"
            return f"stopped by {signal.Signals(self.signum).name} at step {self.step}; {how}"
        if self.step == self.total_steps:
            title = f"done: {pluralize(self.step, 'step')}"
        else:
            title = f"ended by {self.ended_by} at step {self.step} of {self.total_steps}"
        if not is_saved:
            return f"{title}, not saved (save_final=false)"
        return title + (
            "; resume=latest continues" if self.ended_by in ("STOP", "stop_after_steps", "a callback") else ""
        )


def show_end(run: Run, totals: RunTotals, end: RunEnd, records: str) -> None:
    """Show the panel at the end of a run. records: what became of those of a stream; else empty."""
    setup, folder = run.setup, run.folder
    facts = totals.describe() | ({"data": records} if records else {})
    best, exported = end.best, end.exported
    evaluation = ""
    if end.last_eval is not None:
        evaluation = describe_evaluation(end.last_eval, run.config)
        facts["evaluation"] = f"{evaluation} at step {end.last_eval['step']}"
    if best is not None:
        facts["best"] = f"{best.metric} {best.value:.4f} at step {best.step}" + (", exported" if exported else "")
    if is_saved := (checkpoint := folder.find_checkpoint(end.step)).is_dir():
        facts["checkpoint"] = str(checkpoint)
    if exported is not None:
        facts["exported"] = f"{exported}, a {'Hugging Face model' if setup.adapter is None else 'peft adapter'}"
        if find_head(setup.architecture) is None:
            facts["talk to it"] = f"python scripts/generate.py --model_name_or_path {exported}"
        resume = "latest" if best is None or best.step == end.step else folder.find_checkpoint(best.step)
        facts["evaluate it"] = f"the same command with evaluate_only=true resume={resume} eval_file=FILE"
    show_panel(end.describe(is_saved), facts)
    for line in totals.summarize(setup.architecture.model_type, setup.layout.describe_ranks(), evaluation):
        say(line)
