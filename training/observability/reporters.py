"""The reporters of a run: its metrics file, its loggers and the progress bar. Main rank only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from omegaconf import OmegaConf

from training.checkpoint.run_folder import RunFolder
from training.config.schema import RunConfig
from training.inputs.step_budget import StepBudget
from training.observability.environment import describe_environment
from training.observability.loggers import build_loggers
from training.observability.metrics import MetricsFile, ProgressBar, Reporter
from training.planner.prediction import Prediction
from training.planner.report import list_figures, render_plan


def open_reporters(
    config: RunConfig,
    prediction: Prediction,
    *,
    folder: RunFolder,
    budget: StepBudget,
    first_step: int,
    hosts: Sequence[str],
) -> list[Reporter]:
    """Open the reporters of a training run; its loggers get the plan too. hosts: the host of each rank."""
    known = describe_run(config, hosts)
    if prediction.peak_flops is not None:  # else the times of the plan are those of another machine
        text = render_plan(prediction.plan, config, prediction.hardware, budget.total_steps)
        folder.plan.write_text(text + "\n")
        known |= {"plan": list_figures(prediction.plan), "plan_table": text}
    loggers = build_loggers(config.logger, folder.path, known, first_step)
    bar = ProgressBar(first_step, budget.last_step, shows_routers=config.moe.shapes_routers)
    return [MetricsFile(folder.metrics, first_step), *loggers, bar]


def open_evaluation_reporters(config: RunConfig, folder: RunFolder, hosts: Sequence[str]) -> list[Reporter]:
    """Open the loggers of a run that only evaluates. hosts: the host of each rank."""
    return build_loggers(config.logger, folder.path, describe_run(config, hosts), first_step=None)


def describe_run(config: RunConfig, hosts: Sequence[str]) -> dict[str, Any]:
    """Return the config and the environment of a run, ready for JSON. hosts: the host of each rank."""
    return {
        "config": OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True),
        "environment": describe_environment(hosts),
    }
