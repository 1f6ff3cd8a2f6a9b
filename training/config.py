"""The schema of a run. Hydra fills it from `conf/`, and from here on only typed objects travel.

Names are those of DeepSpeed, Megatron and Hugging Face. Scalars of the run are top-level keys; a group holds only what differs
between its options. Every key is described once, in `conf/base.yaml`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING


class Precision(Enum):
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


class Offload(Enum):
    none = "none"
    cpu = "cpu"


class SchedulerType(Enum):
    cosine = "cosine"
    linear = "linear"
    constant = "constant"


class AttnImplementation(Enum):
    sdpa = "sdpa"
    eager = "eager"
    flash_attention_2 = "flash_attention_2"
    flash_attention_3 = "flash_attention_3"
    flex_attention = "flex_attention"


class PadTo(Enum):
    longest = "longest"
    max_seq_length = "max_seq_length"


class OnNonfinite(Enum):
    stop = "stop"
    skip = "skip"


class OptimizerName(Enum):
    adamw = "adamw"
    sgd = "sgd"


class LoggerName(Enum):
    none = "none"
    wandb = "wandb"


class WandbMode(Enum):
    online = "online"
    offline = "offline"


@dataclass
class DataConfig:
    prompt_field: str = MISSING
    completion_field: str = MISSING
    messages_field: str = MISSING
    prompt_template: str = MISSING
    pad_to: PadTo = MISSING
    cache_dir: str = MISSING
    num_proc: int = MISSING


@dataclass
class OptimizerConfig:
    name: OptimizerName = MISSING
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1e-8


@dataclass
class LoggerConfig:
    name: LoggerName = LoggerName.none
    project: str = "llm-pipeline"
    run_name: str | None = None
    mode: WandbMode = WandbMode.online


@dataclass
class RunConfig:
    """One run. The defaults live in `conf/base.yaml`."""

    model: dict[str, Any] = field(default_factory=dict)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    deepspeed: dict[str, Any] = field(default_factory=dict)

    model_name_or_path: str = MISSING
    tokenizer_name_or_path: str | None = MISSING
    trust_remote_code: bool = MISSING
    train_file: Any = MISSING
    eval_file: Any = MISSING
    output_dir: str = MISSING
    overwrite_output_dir: bool = MISSING
    resume: str | None = MISSING
    resume_allow_changes: bool = MISSING
    trust_checkpoint: bool = MISSING

    num_stages: int = MISSING
    partition_method: Any = MISSING
    micro_batch_size: int | None = MISSING
    gradient_accumulation_steps: int | None = MISSING
    global_batch_size: int | None = MISSING
    max_seq_length: int = MISSING
    num_workers: int = MISSING
    seed: int = MISSING

    learning_rate: float = MISSING
    lr_scheduler_type: SchedulerType = MISSING
    min_lr_ratio: float = MISSING
    warmup_ratio: float = MISSING
    weight_decay: float = MISSING
    max_grad_norm: float = MISSING
    on_nonfinite: OnNonfinite = MISSING
    num_train_epochs: float = MISSING
    max_steps: int | None = MISSING
    stop_after_steps: int | None = MISSING

    logging_steps: int = MISSING
    eval_steps: int | None = MISSING
    eval_on_start: bool = MISSING
    save_steps: int | None = MISSING
    save_minutes: float | None = MISSING
    async_save: bool = MISSING
    keep_last: int | None = MISSING
    keep_best: int | None = MISSING
    grace_seconds: float = MISSING

    precision: Precision = MISSING
    offload_optimizer: Offload = MISSING
    activation_checkpoint_interval: int = MISSING
    attn_implementation: AttnImplementation = MISSING


def register_schema() -> None:
    """Makes `run_schema` known to Hydra; `conf/base.yaml` starts from it."""
    ConfigStore.instance().store(name="run_schema", node=RunConfig)
