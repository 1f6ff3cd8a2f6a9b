"""The `Engine` of a pipeline stage: our loop over a schedule's passes, DeepSpeed's engine for the optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine

from data.loading.step_totals import StepTotals
from data.options import PadTo
from models.losses.cross_entropy import Loss
from training.config.precision import DTYPES
from training.config.schema import Precision, RunConfig
from training.distributed.process import has_accelerator, has_triton
from training.distributed.topology import PIPE, Layout
from training.engine.deepspeed_backed import DeepSpeedBacked, configure_gc, keep_scale
from training.engine.deepspeed_config import build_deepspeed_config, choose_reduce_dtype
from training.engine.engine import Engine, StepObserver
from training.engine.gradient_sums import GradientSums, list_backward
from training.engine.one_pass_step import replace_step
from training.engine.reduce_buckets import reduces_in_passes
from training.engine.runner import Runner, StageWithLoss, StepGradients
from training.engine.shard_groups import (
    ExpertGroups,
    ShardGroups,
    is_expert,
    join_expert_groups,
    join_shard_groups,
    partition_experts,
    separate_experts,
    shard_within,
)
from training.optim.optimizer import build_optimizer, declare_state, keeps_blocks, updates_at_once
from training.optim.parameter_groups import group_trained, separate_copies, separate_fp32
from training.pipeline.module import StageModule
from training.pipeline.schedules import build_schedule
from training.pipeline.transfers import Transfers


def start_pipeline(module: StageModule, config: RunConfig, layout: Layout, trains: bool = True) -> Engine:
    """Build the engine for this rank's stage. trains: False for an engine without an optimizer, which only
    evaluates."""
    optimizer = build_optimizer(group_stage(module, config), config, has_triton()) if trains else None
    settings = build_deepspeed_config(config, layout, trains, has_accelerator())
    assert layout.schedule == config.schedule, f"the layout is not yet scheduled: {layout}"
    groups = join_shard_groups(layout, module.global_rank) if trains else None
    wrapped = StepEngine(module, optimizer, settings, groups, join_expert_groups(module))
    configure_gc(settings)
    gradients = None
    if trains:
        gradients = GradientSums(
            module,
            wrapped.optimizer,
            list_backward(build_schedule(layout).list_units(module.stage_id)),
            shards=config.shards_gradients,
            reduce_dtype=DTYPES[Precision(choose_reduce_dtype(config, layout))],
            reduces_in_passes=reduces_in_passes(layout, module.routers is not None),
            groups=groups,
        )
        if updates_at_once(config, has_triton()):
            replace_step(wrapped.optimizer, gradients.parts)
        if config.precision is Precision.fp16:
            keep_scale(wrapped.optimizer)
    engine = PipelineStage(
        wrapped, module, layout, config, model=StageWithLoss(module), gradients=gradients, update=wrapped.take_step
    )
    engine.saves_state = groups is None or groups.is_first
    return engine


def group_stage(module: StageModule, config: RunConfig) -> list[dict[str, Any]]:
    """Return the parameter groups of a stage; an empty one gets a placeholder parameter."""
    groups = group_trained(module, config)
    if module.trains_fp32:
        groups = separate_fp32(groups, module)
    if keeps_blocks(config):
        groups = separate_copies(groups, module)
    if module.ranks.expert_parallel.size > 1:
        groups = separate_experts(groups, module)
    for group in groups:
        if not group["params"]:
            placeholder = module.add_placeholder()
            placeholder.allreduce = "moe" not in group  # type: ignore[attr-defined]  # as `mark_parameters` does
            group["params"].append(placeholder)
    return groups


class StepEngine(DeepSpeedEngine):
    """DeepSpeed's engine for its optimizer step alone."""

    def __init__(
        self,
        module: StageModule,
        optimizer: torch.optim.Optimizer | None,
        config: dict[str, Any],
        groups: ShardGroups | None,
        expert_groups: ExpertGroups | None,
    ) -> None:
        """Build the engine as `deepspeed.initialize` does, which would choose its pipeline engine for a
        `PipelineModule`. groups: None where ZeRO partitions over all replicas. expert_groups: None where each rank has
        all experts."""
        mpu = module.mpu()
        self._shard_groups, self._expert_groups = groups, expert_groups  # which the constructor needs
        self._in_fp32 = [(parameter, parameter.detach()) for parameter in module.in_fp32]
        super().__init__(
            args=None,
            model=module,
            optimizer=optimizer,
            mpu=mpu,
            config=config,
            config_class=DeepSpeedConfig(config, mpu),
        )
        self._restore_fp32()
        if optimizer is not None:
            self.set_gradient_accumulation_boundary(True)  # it sees the end of a step alone

    def _restore_fp32(self) -> None:
        """Give parameters that stay in fp32 their values again: the constructor casts all of a model in 16 bits."""
        for parameter, values in self._in_fp32:
            parameter.data = values

    def _configure_zero_optimizer(self, optimizer: Any) -> Any:
        self._restore_fp32()
        with shard_within(self, self._shard_groups), partition_experts(self, self._expert_groups):
            return super()._configure_zero_optimizer(optimizer)

    def _broadcast_model(self) -> None:
        """Give all ranks that have a parameter the values of the first. DeepSpeed's own would take the ranks that have
        the same experts from global variables."""
        if self._expert_groups is None:
            super()._broadcast_model()
            return
        for parameter in self.module.parameters():
            group = self._expert_groups.replicas if is_expert(parameter) else self.seq_data_parallel_group
            dist.broadcast(parameter.detach().view(torch.uint8), group=group, group_src=0)

    def take_step(self) -> None:
        """Clip the gradients, update the weights, and count the step."""
        self._take_model_step(None)


class PipelineStage(DeepSpeedBacked):
    """The engine of a pipeline stage; a model in one stage is one too."""

    def __init__(
        self,
        wrapped: DeepSpeedEngine,
        module: StageModule,
        layout: Layout,
        config: RunConfig,
        *,
        model: torch.nn.Module,
        gradients: StepGradients | None,
        update: Callable[[], None],
    ) -> None:
        """model, gradients, update: as the `Runner` needs them."""
        super().__init__(wrapped, module, layout, config, {} if gradients is None else declare_state(config))
        self.gradients = gradients
        schedule = build_schedule(layout)
        self._transfers = Transfers(schedule, layout.topology.groups(PIPE), self.rank, self.device)
        self._runner = Runner(module, model, schedule, self._transfers, gradients, update)
        mpu = self.module.mpu()
        self.replicas, self._stages = mpu.get_data_parallel_group(), mpu.get_pipe_parallel_group()
        self._loss_stage = schedule.find_stage(schedule.last_chunk)

    def train_step(
        self,
        micro_batches: Iterator[Any],
        step: int,
        total_steps: int,
        totals: StepTotals | None = None,
        is_last: bool = False,
    ) -> tuple[torch.Tensor, float]:
        learning_rate = self.start_step(step, total_steps, totals, is_last)
        if self._config.data.pad_to is PadTo.longest:
            self._transfers.forget_shapes()  # they are sent once a step
        losses = self._runner.run(self._runner.start_step(), micro_batches)
        self._runner.update()
        loss = self._average(losses)
        if self.module.routers is not None:
            self.module.routers.finish_step(was_taken=not self.has_skipped_step())
        return loss, learning_rate

    def _average(self, losses: list[torch.Tensor]) -> torch.Tensor:
        """The mean loss over the step's micro-batches and replicas, a scalar, on every rank."""
        mean = torch.zeros((), device=self.device)
        if losses:
            mean = torch.stack(losses).float().mean()
            dist.all_reduce(mean, group=self.replicas)
            mean /= dist.get_world_size(self.replicas)
        dist.broadcast(mean, group=self._stages, group_src=self._loss_stage)
        return mean

    @torch.no_grad()
    def forward_only(
        self, micro_batches: Iterator[Any] | None, num_micro_batches: int, loss: Loss | None = None
    ) -> list[Any]:
        self._transfers.forget_shapes()  # other shapes than in training
        program = self._runner.start_evaluation(num_micro_batches)
        losses = self._runner.run(program, micro_batches, loss)
        self._transfers.forget_shapes()
        return losses

    def observe(self, observer: StepObserver | None) -> None:
        self._runner.observer = observer
