"""The reporters of a run: its metrics file, its loggers and the progress bar. Main rank only."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from data.storage.file_report import shorten_source
from data.storage.tokenized import load_summary
from extension import collect_facts
from filesystem import write_atomically
from masking import mask
from training.checkpoint.run_folder import RunFolder
from training.config.schema import RunConfig
from training.inputs.skipped_data import count_trained
from training.inputs.step_budget import StepBudget
from training.observability.environment import describe_environment
from training.observability.loggers import IsolatedReporter, build_loggers
from training.observability.metrics import EventsFile, MetricsFile, ProgressBar, Reporter
from training.observability.run_page import RunPage
from training.plan_command.report import list_figures, render_plan
from training.planner.prediction import Prediction


def open_reporters(
    config: RunConfig,
    prediction: Prediction,
    *,
    folder: RunFolder,
    datasets: Mapping[str, Path],
    budget: StepBudget,
    first_step: int,
    hosts: Sequence[str],
) -> list[Reporter]:
    """Write what is known of a training run before its first step to run.json, and open its reporters. datasets:
    key -> tokenized folder. hosts: the host of each rank."""
    known = describe_run(config, hosts) | {"data": describe_data(datasets)}
    if facts := collect_facts(config, hosts):
        known |= {"facts": mask(facts)}
    if prediction.is_known:  # else the times of the plan are those of another machine
        trained = count_trained(0, budget.last_step, config.skip_data_intervals)
        text = render_plan(prediction.plan, trained)
        folder.plan.write_text(text + "\n")
        known |= {"plan": list_figures(prediction.plan), "plan_table": text}
    write_atomically(folder.facts, json.dumps(known, indent=2) + "\n")
    files = [MetricsFile(folder.metrics, first_step), EventsFile(folder.events, first_step)]
    page = IsolatedReporter(folder.report.name, lambda: RunPage(folder, first_step))
    loggers = build_loggers(config.logger, folder.path, known, first_step)
    bar = ProgressBar(config, first_step, budget.last_step)
    return [*files, page, *loggers, bar]


def open_evaluation_reporters(config: RunConfig, folder: RunFolder, hosts: Sequence[str]) -> list[Reporter]:
    """Open the loggers of a run that only evaluates. hosts: the host of each rank."""
    return build_loggers(config.logger, folder.path, describe_run(config, hosts), first_step=None)


def describe_data(datasets: Mapping[str, Path]) -> dict[str, list[dict[str, Any]]]:
    """Return what each key's files became, ready for JSON. datasets: key -> tokenized folder."""
    return {
        key: [
            {
                "name": shorten_source(file.name),
                "samples": file.counts.num_samples,
                "tokens": file.counts.num_tokens,
                "targets": file.counts.num_targets,
            }
            for file in load_summary(folder).files
        ]
        for key, folder in datasets.items()
    }


def describe_run(config: RunConfig, hosts: Sequence[str]) -> dict[str, Any]:
    """Return the config and the environment of a run without secrets, ready for JSON. hosts: the host of each rank."""
    described = {
        "config": OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True),
        "environment": describe_environment(hosts),
    }
    return mask(described)
