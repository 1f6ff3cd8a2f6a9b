"""Checks of a config that need no process group, file of weights or GPU."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from packaging.version import Version
from transformers import PretrainedConfig

from errors import UserError
from extension import find_plan
from training.config.incompatible import CheckedConfig, check_together
from training.config.ranges import check_ranges
from training.config.schema import OptimizerConfig, RunConfig
from training.config.sources import list_evaluations, parse_key, read_files

# docs/inside.md has the table of versions that were tried
MIN_DEEPSPEED = "0.19.4"

# Half of a step of bf16 is at most 1/256: so an average in bf16 always comes down when what it averages is 0.
MAX_BF16_BETA = 0.996


def check_deepspeed_version(installed: str | None = None) -> None:
    """Raise UserError for a DeepSpeed that is too old."""
    installed = installed or version("deepspeed")
    if Version(installed) < Version(MIN_DEEPSPEED):
        raise UserError(
            f"deepspeed {installed} is too old: releases before {MIN_DEEPSPEED} lack what this project builds on; "
            f"install deepspeed>={MIN_DEEPSPEED},<0.20 (pip install -r requirements.txt)"
        )


def check_config(config: RunConfig, has_accelerator: bool) -> None:
    """Raise UserError for a value out of range, or two keys that contradict each other."""
    check_ranges(config)
    _check_export_steps(config.export_steps)
    _check_skipped_data(config)
    _check_betas(config.optimizer)
    _check_files(config)
    if not isinstance(config.plan, bool):
        find_plan(str(config.plan))
    check_together(CheckedConfig(config, has_accelerator))


def _check_files(config: RunConfig) -> None:
    """Raise UserError for a value of `train_file` or `eval_file` that names no files, or is not a mixture."""
    reads_train_file = config.data.holds_out or not config.evaluate_only
    for key in (*(["train_file"] if reads_train_file else []), *list_evaluations(config).values()):
        files = read_files(config, key)
        entries = files if isinstance(files, list) else [files]
        is_function = isinstance(files, dict) and "_target_" in files
        if not files or (not is_function and not isinstance(files, (str, list))):
            raise UserError(f"{key}={files}: give a path, a glob, a list of these, or hf:NAME")
        if not any(isinstance(entry, dict) and "_target_" in entry for entry in entries):
            parse_key(config, key)
    if config.eval_file == {}:
        raise UserError("eval_file={}: name at least one file, or give null")


def _check_export_steps(steps: list[int]) -> None:
    if any(step < 1 for step in steps):
        raise UserError(f"export_steps={steps}: give steps from 1, such as [500,1000]")


def _check_skipped_data(config: RunConfig) -> None:
    """Raise UserError for an interval that is empty or holds a step to be profiled."""
    for interval in config.skip_data_intervals:
        if len(interval) != 2 or not 1 <= interval[0] <= interval[1]:
            raise UserError(
                f"skip_data_intervals: {interval} is not a first and a last step; give steps from 1, such as "
                "[[100,120]]"
            )
        for key in ("profile_step", "profile_trace"):
            if getattr(config, key) is not None and interval[0] <= getattr(config, key) <= interval[1]:
                raise UserError(f"{key}={getattr(config, key)} is in skip_data_intervals; give a step that is trained")


def _check_betas(optimizer: OptimizerConfig) -> None:
    """Raise UserError for betas out of range, or too close to 1 for averages in bf16."""
    betas = optimizer.betas
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise UserError(f"optimizer.betas={list(betas)}: two numbers from 0 to below 1, such as [0.9,0.95]")
    if optimizer.rounds_state and max(betas) > MAX_BF16_BETA:
        raise UserError(
            f"optimizer.betas={list(betas)}: at most {MAX_BF16_BETA} with optimizer.state_dtype=bf16, where an average "
            "that moves by less a step is rounded back to what it was; give optimizer.betas=[0.9,0.95], or "
            "optimizer.state_dtype=fp32"
        )


def check_model_fields(stated: dict[str, Any], config: PretrainedConfig, where: str) -> None:
    """Raise UserError when a field of conf/model/ differs from the weights' own config.json."""
    for key, value in stated.items():
        if not hasattr(config, key):
            raise UserError(f"model.{key} is not a field of a '{config.model_type}' config")
        if getattr(config, key) != value:
            raise UserError(
                f"model.{key}={value}, but {where}/config.json says {getattr(config, key)}; the weights decide: "
                "choose the model group that describes them, or model=from_checkpoint"
            )
