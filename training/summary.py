"""What is said of a run at its beginning and at its end, fact by fact; `console.show_panel` shows it. Main rank only."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from data.storage.tokenized import load_summary
from models.architecture import warn_of_length
from training.checkpoint.run_folder import RunFolder
from training.checkpoint.state import TrainerState
from training.config.schema import CheckpointMode, RunConfig
from training.inputs.datasets import list_entries
from training.inputs.step_budget import StepBudget
from training.observability.metrics import Record, describe_evaluation
from training.planner.hardware import GIB
from training.planner.prediction import Prediction
from training.planner.report import render_count, render_seconds
from training.setup import RunSetup

Facts = dict[str, str]


def describe_start(
    config: RunConfig,
    plan: RunSetup,
    horizon: StepBudget,
    start: TrainerState,
    datasets: dict[str, Path],
    expectation: Prediction,
    hosts: Sequence[str],
) -> Facts:
    """Of a run that trains. datasets: key -> tokenized folder. hosts: that of each rank."""
    facts = {
        "model": _describe_model(plan, expectation),
        "data": _describe_data(config, "train_file", datasets, horizon.num_samples),
    }
    if text := warn_of_length(plan.source.config, config.max_seq_length):
        facts["warning"] = text
    if horizon.evaluation is not None:
        when = f"every {config.eval_steps} steps and at the end" if config.eval_steps else "at the end"
        facts["evaluation"] = f"{_describe_data(config, 'eval_file', datasets, horizon.evaluation.rows)}; {when}"
    facts |= describe_layout(plan, hosts)
    epochs = horizon.total_steps * plan.layout.global_batch_size / horizon.num_samples
    facts["steps"] = (
        f"{start.step} to {horizon.last_step} of {horizon.total_steps}, {epochs:.3g} {'epoch' if epochs == 1 else 'epochs'}"
    )
    facts["precision"] = (
        f"{config.precision.value}; {_describe_recomputation(config)}; attention {plan.source.config._attn_implementation}"
    )
    facts["memory"] = _describe_memory(expectation)
    facts["output"] = f"{config.output_dir} (metrics.jsonl, checkpoints/, logs/; hf/ at the end)"
    if plan.resume_from is not None:
        facts["resumed from"] = str(plan.resume_from)
    return facts


def describe_evaluation_run(
    config: RunConfig, plan: RunSetup, rows: int, datasets: dict[str, Path], hosts: Sequence[str]
) -> Facts:
    """Of a run that only evaluates."""
    return {
        "model": _describe_model(plan),
        "data": _describe_data(config, "eval_file", datasets, rows),
        **describe_layout(plan, hosts),
        "precision": f"{config.precision.value}; attention {plan.source.config._attn_implementation}",
        "output": f"{config.output_dir}/evaluation.json",
    }


def describe_layout(plan: RunSetup, hosts: Sequence[str]) -> Facts:
    what = "layers a chunk" if plan.layout.num_chunks > 1 else "layers a stage"
    facts = {"layout": plan.layout.describe(), what: str([stop - start for start, stop in pairwise(plan.bounds)])}
    if len(set(hosts)) > 1:
        facts["hosts"] = plan.layout.describe_placement(list(hosts))
    return facts


def _describe_model(plan: RunSetup, expectation: Prediction | None = None) -> str:
    sizes = ""
    if expectation is not None:
        total, trained = expectation.count_parameters(), expectation.count_parameters(trained=True)
        sizes = f" of {render_count(total)} parameters" + (
            f", {render_count(trained)} of them trained" if trained < total else ""
        )
    adapter = "" if plan.adapter is None else f"; adapter of rank {plan.adapter.config.r}"
    return f"{plan.source.config.model_type}{sizes}, from {plan.source.path}{adapter}"


def _describe_data(config: RunConfig, key: str, datasets: dict[str, Path], num_rows: int) -> str:
    entries, summary = list_entries(config, key), load_summary(datasets[key])
    named = entries[0] if len(entries) == 1 else f"{entries[0]} and {len(entries) - 1} more"
    rows = f" in {num_rows:,} packed rows" if config.data.packing else ""
    return f"{named}: {summary.num_samples:,} samples, {render_count(summary.num_tokens)} tokens{rows}"


def _describe_recomputation(config: RunConfig) -> str:
    if config.activation_checkpoint_interval == 0:
        return "all activations kept"
    if config.activation_checkpoint_mode is CheckpointMode.grouped:
        return f"activations recomputed in groups of {config.activation_checkpoint_interval} layers"
    return f"activations recomputed (interval {config.activation_checkpoint_interval}, {config.activation_checkpoint_mode.value})"


def _describe_memory(expectation: Prediction) -> str:
    most = max(expectation.peak_memory)
    limit = f" of {expectation.plan.memory_limit / GIB:.1f}" if expectation.peak_flops is not None else ""
    return f"{most / GIB:.2f}{limit} GiB a rank expected on stage {expectation.peak_memory.index(most)}, the fullest"


class RunTotals:
    """A reporter that keeps what the end tells."""

    def __init__(self, start: TrainerState) -> None:
        self._start, self._step, self._seconds, self._began = start, start.step, 0.0, time.monotonic()
        self._last: Record | None = None

    def advance(self, step: int) -> None:
        pass

    def report(self, record: Record) -> None:
        if "loss" in record:
            self._seconds += record["step_time"] * (record["step"] - self._step)
            self._step, self._last = record["step"], record

    def close(self) -> None:
        pass

    def describe(self) -> Facts:
        """Steps, tokens, time and loss; empty when no step was reported."""
        if self._last is None:
            return {}
        tokens = self._last["num_tokens"] - self._start.num_tokens
        whole = render_seconds(time.monotonic() - self._began)
        return {
            "trained": f"{self._step - self._start.step} steps, {render_count(tokens)} tokens, {tokens / self._seconds:,.0f} tokens/s",
            "time": f"{whole}, {render_seconds(self._seconds)} of it in steps",
            "loss": f"{self._last['loss']:.4f} at step {self._step}",
        }


def describe_end(
    totals: RunTotals, plan: RunSetup, folder: RunFolder, step: int, last_eval: Record | None, finished: bool
) -> Facts:
    """finished: with an export; otherwise a signal has ended the run."""
    facts = totals.describe()
    if last_eval is not None:
        facts["evaluation"] = f"{describe_evaluation(last_eval)} at step {last_eval['step']}"
    facts["checkpoint"] = str(folder.checkpoints / f"global_step{step}")
    if not finished:
        return facts
    facts["exported"] = f"{folder.export}, a {'Hugging Face model' if plan.adapter is None else 'peft adapter'}"
    return {
        **facts,
        "talk to it": f"python scripts/generate.py --model_name_or_path {folder.export}",
        "evaluate it": "the same command with evaluate_only=true resume=latest eval_file=FILE",
    }
