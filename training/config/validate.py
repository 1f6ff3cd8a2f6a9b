"""What can be known to be wrong before any process group, file of weights or GPU is touched."""

from __future__ import annotations

import dataclasses
import math
from importlib.metadata import version
from typing import Any

from packaging.version import Version
from transformers import PretrainedConfig

from errors import UserError
from training.config.incompatible import Run, check_together
from training.config.schema import OptimizerConfig, OptimizerName, RunConfig, SchedulerConfig, StateDtype
from training.config.sources import list_evaluations, read_files

# Releases before 0.19.4 have shipped wrong pipeline gradients (issues #7773 and #8152 of deepspeed;
# tests/training/parity/test_parity.py guards the newer ones). Those before 0.19.8 have no `_train_schedule` to override
# and a BF16_Optimizer that does not say when it skips a step (training/engine/deepspeed_internals.py lists such names).
MIN_DEEPSPEED = "0.19.8"

# Half of a step of bf16 is at most 1/256: so an average in bf16 always comes down when what it averages is 0.
MAX_BF16_BETA = 0.996

# Which of `optimizer.betas` and `optimizer.eps` an optimizer takes
OPTIMIZER_KEYS: dict[OptimizerName, set[str]] = {
    OptimizerName.adamw: {"betas", "eps"},
    OptimizerName.adamw_8bit: {"betas", "eps"},
    OptimizerName.lion: {"betas"},
}


def check_deepspeed_version(installed: str | None = None) -> None:
    """Raises UserError for a DeepSpeed that is too old."""
    installed = installed or version("deepspeed")
    if Version(installed) < Version(MIN_DEEPSPEED):
        raise UserError(
            f"deepspeed {installed} is too old: releases before 0.19.4 compute wrong gradients with pipeline stages, "
            f"and those before {MIN_DEEPSPEED} lack what this project builds on; install deepspeed>={MIN_DEEPSPEED},"
            "<0.20 (pip install -r requirements.txt)"
        )


def check_config(config: RunConfig, has_accelerator: bool) -> None:
    """Raises UserError for a value out of range, or two keys that contradict each other."""
    _check_ranges(config)
    for key in ("train_file", *list_evaluations(config.eval_file).values()):
        files = read_files(config, key)
        is_function = isinstance(files, dict) and "_target_" in files
        may_be_missing = key == "train_file" and config.evaluate_only
        if (not files and not may_be_missing) or (files and not is_function and not isinstance(files, (str, list))):
            raise UserError(f"{key}={files}: give a path, a glob, a list of these, or hf:NAME")
    if config.eval_file == {}:
        raise UserError("eval_file={}: name at least one file, or give null")
    if config.plan not in (False, True, "search"):
        raise UserError(f"plan={config.plan}: one of false, true, search")
    check_together(Run(config, has_accelerator))


def _check_ranges(config: RunConfig) -> None:
    """Raises UserError for a number out of range."""
    for key in (
        "logging_steps",
        "max_seq_length",
        "eval_steps",
        "save_steps",
        "profile_step",
        "profile_trace",
        "max_steps",
        "stop_after_steps",
        "keep_last",
        "keep_best",
        "early_stopping_patience",
    ):
        value = getattr(config, key)
        if value is not None and value < 1:
            raise UserError(
                f"{key}={value}: at least 1"
                + (
                    "; null turns it off"
                    if key.endswith(("eval_steps", "save_steps", "profile_step", "profile_trace"))
                    else ""
                )
            )
    for key in ("save_minutes", "grace_seconds", "stuck_minutes", "eval_epochs", "save_epochs"):
        if getattr(config, key) is not None and not 0 < getattr(config, key) < math.inf:
            raise UserError(f"{key}={getattr(config, key)}: more than 0")
    for key in ("warmup_ratio", "min_lr_ratio"):
        if getattr(config, key) is not None and not 0 <= getattr(config, key) <= 1:
            raise UserError(f"{key}={getattr(config, key)}: a share between 0 and 1")
    if not 0 <= config.label_smoothing < 1:
        raise UserError(f"label_smoothing={config.label_smoothing}: from 0 to below 1, where no target would be left")
    if config.warmup_steps is not None and config.warmup_steps < 0:
        raise UserError(f"warmup_steps={config.warmup_steps}: 0 or more")
    _check_schedule(config.lr_scheduler_kwargs)
    for key in (
        "learning_rate",
        "weight_decay",
        "max_grad_norm",
        "num_workers",
        "activation_checkpoint_interval",
        "early_stopping_threshold",
        "neftune_noise_alpha",
    ):
        if not 0 <= getattr(config, key) < math.inf:
            raise UserError(f"{key}={getattr(config, key)}: 0 or more")
    for key, value in dataclasses.asdict(config.moe).items():
        if not 0 <= value < math.inf:
            raise UserError(f"moe.{key}={value:g}: 0 or more; 0 turns it off")
    if config.zero_stage not in (1, 2, 3):
        raise UserError(
            f"zero_stage={config.zero_stage}: 1 shares out the optimizer's state, 2 the sums of gradients too, 3 the "
            "weights too"
        )
    if config.sharding_parallel_size is not None and config.sharding_parallel_size < 1:
        raise UserError(f"sharding_parallel_size={config.sharding_parallel_size}: at least 1, or null")
    limit = config.schedule_memory_limit
    if limit is not None and limit < 1:
        raise UserError(f"schedule_memory_limit={limit}: at least 1, the micro-batches that a rank may hold, or null")
    if config.virtual_stages_per_rank < 2:
        raise UserError(
            f"virtual_stages_per_rank={config.virtual_stages_per_rank}: at least 2; "
            "with one chunk of layers per rank it is schedule=1f1b"
        )
    if not 0 < config.num_train_epochs < math.inf:
        raise UserError(f"num_train_epochs={config.num_train_epochs}: more than 0")
    if any(step < 1 for step in config.export_steps):
        raise UserError(f"export_steps={config.export_steps}: give steps from 1, such as [500,1000]")
    for interval in config.skip_data_intervals:
        if len(interval) != 2 or not 1 <= interval[0] <= interval[1]:
            raise UserError(
                f"skip_data_intervals: {interval} is not a first and a last step; give steps from 1, such as "
                "[[100,120]]"
            )
        for key in ("profile_step", "profile_trace"):
            if getattr(config, key) is not None and interval[0] <= getattr(config, key) <= interval[1]:
                raise UserError(f"{key}={getattr(config, key)} is in skip_data_intervals; give a step that is trained")
    betas, eps = config.optimizer.betas, config.optimizer.eps
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise UserError(f"optimizer.betas={list(betas)}: two numbers from 0 to below 1, such as [0.9,0.95]")
    if config.optimizer.state_dtype is StateDtype.bf16 and max(betas) > MAX_BF16_BETA:
        raise UserError(
            f"optimizer.betas={list(betas)}: at most {MAX_BF16_BETA} with optimizer.state_dtype=bf16, where an average "
            "that moves by less a step is rounded back to what it was; give optimizer.betas=[0.9,0.95], or "
            "optimizer.state_dtype=fp32"
        )
    if not eps > 0:
        raise UserError(f"optimizer.eps={eps}: more than 0")
    name, default = config.optimizer.name, OptimizerConfig()
    for key in sorted({"betas", "eps"} - OPTIMIZER_KEYS.get(name, set())):
        if getattr(config.optimizer, key) != getattr(default, key):
            raise UserError(
                f"optimizer.{key} is not used by optimizer={name.value}; leave it out (custom takes it as a field of "
                "optimizer.custom)"
            )


def _check_schedule(options: SchedulerConfig) -> None:
    """Raises UserError for a number of `lr_scheduler_kwargs` out of range."""
    if options.power is not None and not 0 < options.power < math.inf:
        raise UserError(f"lr_scheduler_kwargs.power={options.power}: more than 0")
    if options.num_cycles is not None and options.num_cycles < 1:
        raise UserError(f"lr_scheduler_kwargs.num_cycles={options.num_cycles}: at least 1")
    if options.decay_ratio is not None and not 0 <= options.decay_ratio <= 1:
        raise UserError(f"lr_scheduler_kwargs.decay_ratio={options.decay_ratio}: a share between 0 and 1")


def check_model_fields(stated: dict[str, Any], config: PretrainedConfig, where: str) -> None:
    """Raises UserError when a field of conf/model/ differs from the weights' own config.json."""
    for key, value in stated.items():
        if not hasattr(config, key):
            raise UserError(f"model.{key} is no field of a '{config.model_type}' config")
        if getattr(config, key) != value:
            raise UserError(
                f"model.{key}={value}, but {where}/config.json says {getattr(config, key)}; the weights decide: "
                "choose the model group that describes them, or model=from_checkpoint"
            )
