"""The `Engine` over DeepSpeed's `PipelineEngine`, in the version of `executor.py` that runs any schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from data.options import PadTo
from models.losses.cross_entropy import Loss
from training.config.precision import DTYPES
from training.config.schema import Precision
from training.distributed.process import has_accelerator
from training.distributed.topology import Layout
from training.engine.deepspeed_backed import DeepSpeedBacked, EngineKeys, move_micro_batches
from training.engine.deepspeed_config import build_deepspeed_config, choose_reduce_dtype
from training.engine.engine import Engine, StepObserver
from training.engine.executor import ScheduleEngine
from training.engine.host_waits import avoid_host_waits
from training.engine.shard_groups import ShardGroups, average_parts, join_shard_groups
from training.engine.sharded_sums import ShardedSums
from training.engine.zero2 import announce_passes, shard_sums
from training.engine.zero_patches import (
    free_gradients_by_bucket,
    skip_averaging,
    sum_by_one_function,
    sweep_after_backward,
)
from training.optim.optimizer import OptimizerKeys, build_optimizer, declare_state, keeps_blocks
from training.optim.parameter_groups import group_trained, separate_copies
from training.optim.state_kinds import DeclaredState
from training.pipeline.module import StageModule
from training.pipeline.schedules import build_schedule


def start_pipeline(module: StageModule, config: EngineKeys, layout: Layout, trains: bool = True) -> Engine:
    """Build the engine for this rank's stage. trains: False for an engine without an optimizer, which only
    evaluates."""
    optimizer = build_optimizer(group_stage(module, config), config) if trains else None
    settings = build_deepspeed_config(config, layout, trains, has_accelerator())
    assert layout.schedule == config.schedule, f"the layout is not yet scheduled: {layout}"
    groups = join_shard_groups(layout, module.global_rank) if trains else None
    wrapped = ScheduleEngine(module, optimizer, settings, build_schedule(layout), groups)
    avoid_host_waits(wrapped)
    sum_by_one_function(wrapped.optimizer)
    free_gradients_by_bucket(wrapped.optimizer)
    reduce_dtype = DTYPES[Precision(choose_reduce_dtype(config, layout))]
    sums = None
    if trains and config.shards_gradients_only:
        sums = shard_sums(wrapped, reduce_dtype, groups)
    elif layout.num_weight_replicas == 1:
        skip_averaging(wrapped)
    engine = DeepSpeedPipeline(
        wrapped,
        layout,
        has_varying_lengths=config.data.pad_to is PadTo.longest,
        kept=declare_state(config) if trains else {},
        sums=sums,
    )
    if groups is not None:
        engine.use_shard_groups(groups, reduce_dtype)
    return engine


def group_stage(module: StageModule, config: OptimizerKeys) -> list[dict[str, Any]]:
    """Return the parameter groups of a stage; an empty one gets a placeholder parameter."""
    groups = group_trained(module, config)
    if keeps_blocks(config):
        groups = separate_copies(groups, module)
    for group in groups:
        if not group["params"]:
            group["params"].append(module.add_placeholder())
    counted = [each for group in groups for each in group["params"] if getattr(each, "model_parallel", False)]
    if module.parallel.size > 1 and not counted:
        # only the first rank counts replicated parameters in the norm; the others need some parameter to count
        groups[1]["params"].append(module.add_placeholder())
    return groups


class DeepSpeedPipeline(DeepSpeedBacked):
    """The engine of a pipeline stage.

    has_varying_lengths: micro-batches of one step may be longer than those of another. kept: the declared optimizer
    state. sums: the accumulated gradients, where they are sharded over replicas (ZeRO-2).
    """

    def __init__(
        self,
        wrapped: ScheduleEngine,
        layout: Layout,
        has_varying_lengths: bool,
        kept: DeclaredState,
        sums: ShardedSums | None = None,
    ) -> None:
        super().__init__(wrapped, wrapped.module, layout, kept)
        self._has_varying_lengths, self.sums = has_varying_lengths, sums
        executed = type(wrapped)._INSTRUCTION_MAP
        executed = sweep_after_backward(executed) if sums is None else announce_passes(executed, sums)
        self._instructions = self.wrapped._INSTRUCTION_MAP = executed

    def use_shard_groups(self, groups: ShardGroups, reduce_dtype: torch.dtype) -> None:
        """Set up an optimizer that partitions within shard groups, so that each part is on several ranks."""
        self.saves_state = groups.is_first
        optimizer = self.wrapped.optimizer
        if self.sums is None and isinstance(optimizer, DeepSpeedZeroOptimizer):  # others average over all replicas
            self._instructions = average_parts(self._instructions, optimizer, groups, reduce_dtype)
            self.wrapped._INSTRUCTION_MAP = self._instructions

    def train_step(self, micro_batches: Iterator[Any], learning_rate: float, seed: int) -> torch.Tensor:
        self.start_step(learning_rate, seed)
        if self._has_varying_lengths:
            self.wrapped.reset_activation_shape()  # shapes are sent once a step
        return self.wrapped.train_batch(move_micro_batches(micro_batches, self.device))

    def forward_only(
        self, micro_batches: Iterator[Any] | None, num_micro_batches: int, loss: Loss | None = None
    ) -> list[Any]:
        own, self.module.loss_fn = self.module.loss_fn, loss or self.module.loss_fn
        self.wrapped.reset_activation_shape()  # other shapes than in training
        try:
            outputs = self.wrapped.eval_batch(
                move_micro_batches(micro_batches, self.device),
                reduce_output=None,
                bcast_loss=False,
                num_micro_batches=num_micro_batches,
            )
        finally:
            self.module.loss_fn = own
        self.wrapped.reset_activation_shape()
        return outputs if self.module.has_loss else []

    def observe(self, observer: StepObserver | None) -> None:
        """Wrap every entry of `_INSTRUCTION_MAP`, where `PipelineEngine._exec_schedule` looks instructions up. The map
        belongs to this instance, so other engines are not affected (0.19.8, runtime/pipe/engine.py)."""
        self.wrapped._INSTRUCTION_MAP = self._instructions
        if observer is not None:
            self.wrapped._INSTRUCTION_MAP = {
                kind: _observed(kind.__name__, execute, observer) for kind, execute in self._instructions.items()
            }


def _observed(unit: str, execute: Callable[..., None], observer: StepObserver) -> Callable[..., None]:
    def run(engine: PipelineEngine, **arguments: Any) -> None:
        observer.before(unit)
        execute(engine, **arguments)
        observer.after(unit)

    return run
