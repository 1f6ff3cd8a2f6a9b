"""The run whose first step a proof takes: the layout of the user's run, a small model of the same family, fp32 and SGD.

It starts from the defaults of all keys and takes over those that decide how a gradient is computed. What is listed here
is what a proof proves.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, is_dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from models.adapters.options import AdapterName
from models.generic.shrink import SmallSizes, shrink
from models.weights.quantized import QUANTIZATION_CONFIG
from training.config.schema import (
    AttnImplementation,
    OptimizerName,
    Precision,
    RunConfig,
    SchedulerType,
    StateDtype,
    load_defaults,
)
from training.distributed.topology import Layout, build_layout
from training.objectives.registry import get_objective
from training.resolution.resolve import ResolvedRun

# Keys that the small run has from the user's
KEPT = (
    "num_stages", "tensor_parallel_size", "sequence_parallel", "context_parallel_size", "context_parallel_mode",
    "expert_parallel_size", "zero_stage", "sharding_parallel_size", "schedule", "virtual_stages_per_rank",
    "schedule_memory_limit", "activation_checkpoint_interval", "activation_checkpoint_mode", "activation_offload",
    "offload_optimizer", "offload_parameters", "fused_kernels", "freeze", "task", "label_smoothing", "moe", "seed",
)  # fmt: skip
KEPT_OF_DATA = ("name", "packing", "pad_to", "group_by_length")
# Kernels that compute in fp32, and so may be kept
IN_FP32 = (AttnImplementation.auto, AttnImplementation.sdpa, AttnImplementation.varlen, AttnImplementation.eager)
MIN_LENGTH = 64  # tokens of a row
MOST_ROWS = 2  # of a micro-batch
MOST_INTERVAL = 4  # layers of a chunk, where groups of several are recomputed together
# A power of two that makes the update of a weight far larger than the weight: what rounding takes of the update is then
# a share of the gradient, not of the weight
LEARNING_RATE = 2.0**30


def describe_keys(config: RunConfig, num_ranks: int) -> dict[str, Any]:
    """Return what the small run has from the user's, ready for JSON: runs of which this is equal have one proof."""
    objective, layout = get_objective(config).name, _build_layout(config, num_ranks)
    kept = {key: getattr(config, key) for key in KEPT}
    kept |= {f"data.{key}": getattr(config.data, key) for key in KEPT_OF_DATA}
    kept |= {
        "adapter": config.adapter,
        "attn_implementation": _choose_attention(config),
        "partition_method": _choose_split(config),
        "rope_parameters": config.rope_parameters.list_given(),
        objective: getattr(config, objective, None),
        "ranks": num_ranks,
        "micro_batch_size": _count_rows(layout),
        "gradient_accumulation_steps": _count_micro_batches(layout),
    }
    described: dict[str, Any] = json.loads(json.dumps(kept, default=_to_json))
    return described


def shrink_model(run: ResolvedRun) -> PretrainedConfig:
    """Return the config of a small model with the features of a run's model, and with as many layers, heads and experts
    as its ranks need. Raises UserError where none can be run."""
    config, chunks = run.config, run.layout.num_stages * run.layout.num_chunks
    interval = min(max(1, config.activation_checkpoint_interval), MOST_INTERVAL)
    divided = run.layout.tensor_parallel_size * run.layout.context_parallel_size
    experts = math.lcm(SmallSizes.num_experts, config.expert_parallel_size)
    sizes = SmallSizes(max(SmallSizes.num_layers, chunks * interval), math.ceil(divided / 2), experts)
    small = shrink(run.architecture, sizes)
    if hasattr(small, QUANTIZATION_CONFIG):
        delattr(small, QUANTIZATION_CONFIG)
    return small


def derive_config(config: RunConfig, num_ranks: int, folder: Path) -> RunConfig:
    """Return the config of the small run, whose model, adapter and tokens are in `folder`."""
    defaults, layout = load_defaults(), _build_layout(config, num_ranks)
    task = get_objective(config).name
    adapter = config.adapter
    if adapter.name is not AdapterName.none:
        adapter = replace(adapter, name_or_path=str(folder / "adapter"), loraplus_lr_ratio=None)
    multiple = 2 * layout.context_parallel_size * layout.tensor_parallel_size
    return replace(
        defaults,
        **{key: getattr(config, key) for key in KEPT},
        **({task: getattr(config, task)} if hasattr(config, task) else {}),
        model_name_or_path=str(folder / "model"),
        train_file=str(folder / "tokens"),
        output_dir=config.output_dir,
        data=replace(
            config.data,
            streaming=False,
            max_samples=None,
            filter=None,
            eval_fraction=None,
            eval_samples=None,
            chat_template=None,
            special_tokens=[],
            eos_token=None,
        ),
        adapter=adapter,
        attn_implementation=_choose_attention(config),
        partition_method=_choose_split(config),
        micro_batch_size=_count_rows(layout),
        gradient_accumulation_steps=_count_micro_batches(layout),
        max_seq_length=math.ceil(MIN_LENGTH / multiple) * multiple,
        max_steps=1,
        precision=Precision.fp32,
        optimizer=replace(defaults.optimizer, name=OptimizerName.sgd, state_dtype=StateDtype.fp32),
        learning_rate=LEARNING_RATE,
        lr_scheduler_type=SchedulerType.constant,
        warmup_ratio=0.0,
        max_grad_norm=0.0,
    )


def _build_layout(config: RunConfig, num_ranks: int) -> Layout:
    return build_layout(config, num_ranks, config.num_stages, True)


def _count_rows(layout: Layout) -> int:
    """Return the rows of a micro-batch."""
    return min(layout.micro_batch_size, MOST_ROWS)


def _count_micro_batches(layout: Layout) -> int:
    """Return the micro-batches of a replica: twice the stages, so that a schedule has all its phases; a multiple of the
    stages where the run's own number is one."""
    return min(layout.gradient_accumulation_steps, 2 * layout.num_stages)


def _choose_attention(config: RunConfig) -> AttnImplementation:
    return config.attn_implementation if config.attn_implementation in IN_FP32 else AttnImplementation.auto


def _choose_split(config: RunConfig) -> Any:
    """Return how the layers are split: a list is that of the large model's."""
    return "uniform" if isinstance(config.partition_method, list) else config.partition_method


def _to_json(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return str(value)
