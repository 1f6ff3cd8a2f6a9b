"""The `Engine` over DeepSpeed: its `PipelineEngine` for 1F1B, that of `executor.py` for other schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.engine import PipelineEngine

from data.options import PadTo
from models.losses.cross_entropy import Loss
from training.config.schema import RunConfig
from training.distributed.process import has_accelerator
from training.distributed.topology import Layout
from training.engine.deepspeed_config import build_deepspeed_config
from training.engine.engine import Engine, Partition, PartitionSlice, StepObserver
from training.engine.executor import ScheduleEngine
from training.engine.host_waits import avoid_host_waits
from training.engine.optimizer import build_optimizer, declare_state
from training.engine.parameter_groups import LR_RATIO, group_parameters
from training.engine.state_kinds import DeclaredState
from training.engine.zero_patches import (
    free_gradients_by_bucket,
    skip_averaging,
    sum_by_one_function,
    sweep_after_backward,
)
from training.pipeline.module import StageModule
from training.pipeline.schedules import build_schedule

# What changes in DeepSpeed's DynamicLossScaler (fp16; deepspeed 0.19.8). The others stay as the config makes them.
_LOSS_SCALER_STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def start_engine(module: StageModule, config: RunConfig, layout: Layout, trains: bool = True) -> Engine:
    """Wraps the stage in an engine, with the optimizer over this stage's parameters, or without one when it only
    evaluates."""
    optimizer = build_optimizer(group_stage(module, config), config) if trains else None
    settings = build_deepspeed_config(config, layout, trains, has_accelerator())
    assert layout.schedule == config.schedule, f"the layout is not yet scheduled: {layout}"
    wrapped = ScheduleEngine(module, optimizer, settings, build_schedule(layout))
    avoid_host_waits(wrapped)
    sum_by_one_function(wrapped.optimizer)
    free_gradients_by_bucket(wrapped.optimizer)
    if layout.num_weight_replicas == 1:
        skip_averaging(wrapped)
    return DeepSpeedPipeline(
        wrapped,
        layout,
        has_varying_lengths=config.data.pad_to is PadTo.longest,
        kept=declare_state(config) if trains else {},
    )


def group_stage(module: StageModule, config: RunConfig) -> list[dict[str, Any]]:
    """The parameter groups of a stage, none of them empty."""
    names = {id(parameter): name for name, parameter, _ in module.named_hf_parameters()}  # those of a loss have none
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = group_parameters([(names.get(id(each), ""), each) for each in trained], config)
    for group in groups:
        if not group["params"]:
            group["params"].append(module.add_placeholder())
    counted = [each for group in groups for each in group["params"] if getattr(each, "model_parallel", False)]
    if module.parallel.size > 1 and not counted:
        # of what ranks have alike only the first counts for the norm; the others must count something
        groups[1]["params"].append(module.add_placeholder())
    return groups


class DeepSpeedPipeline(Engine):
    """wrapped: DeepSpeed's engine. has_varying_lengths: micro-batches of one step may be longer than those of
    another. kept: what the optimizer keeps."""

    def __init__(self, wrapped: PipelineEngine, layout: Layout, has_varying_lengths: bool, kept: DeclaredState) -> None:
        self.wrapped, self.layout, self._has_varying_lengths = wrapped, layout, has_varying_lengths
        self._kept = kept
        self.module, self.device, self.rank = wrapped.module, wrapped.device, dist.get_rank()
        self._instructions = wrapped._INSTRUCTION_MAP = sweep_after_backward(type(wrapped)._INSTRUCTION_MAP)

    def train_step(self, micro_batches: Iterator[Any], learning_rate: float, seed: int) -> torch.Tensor:
        for group in self.wrapped.optimizer.param_groups:
            group["lr"] = learning_rate * group[LR_RATIO]
        torch.manual_seed(seed)
        if self._has_varying_lengths:
            self.wrapped.reset_activation_shape()  # shapes are sent once a step
        return self.wrapped.train_batch(_move(micro_batches, self.device))

    def forward_only(
        self, micro_batches: Iterator[Any] | None, num_micro_batches: int, loss: Loss | None = None
    ) -> list[Any]:
        own, self.module.loss_fn = self.module.loss_fn, loss or self.module.loss_fn
        self.wrapped.reset_activation_shape()  # other shapes than in training
        try:
            outputs = self.wrapped.eval_batch(
                _move(micro_batches, self.device),
                reduce_output=None,
                bcast_loss=False,
                num_micro_batches=num_micro_batches,
            )
        finally:
            self.module.loss_fn = own
        self.wrapped.reset_activation_shape()
        return outputs if self.module.has_loss else []

    def gradient_norm(self) -> torch.Tensor:
        return torch.as_tensor(self.wrapped.get_global_grad_norm(), dtype=torch.float64)

    def has_skipped_step(self) -> bool:
        """DeepSpeed's optimizers leave weights and moments as they were when the norm of the gradient is not finite,
        and continue silently (DeepSpeed issue #8415)."""
        return self.wrapped.optimizer.overflow

    def restore_step(self, step: int) -> None:
        self.wrapped.global_steps = step
        self.wrapped.global_samples = step * self.layout.global_batch_size

    def list_partitions(self) -> list[Partition]:
        """One flat fp32 tensor a parameter group: what DeepSpeed's ZeRO and bf16 optimizers hand to torch's."""
        inner = getattr(self.wrapped.optimizer, "optimizer", None)
        if inner is None:
            return []
        flats = [flat for group in inner.param_groups for flat in group["params"][:1]]
        return [Partition(flat, inner.state.get(flat, {}), self._kept) for flat in flats]

    def restore_state(self, partition: int, state: Mapping[str, Any]) -> None:
        self.wrapped.optimizer.optimizer.state[self.list_partitions()[partition].weights].update(state)

    def find_slice(self, parameter: torch.nn.Parameter) -> PartitionSlice | None:
        mapping = parameter._hp_mapping if parameter.requires_grad else None  # type: ignore[attr-defined]
        if mapping is None:
            return None
        held = mapping.hp_fragment_address
        return PartitionSlice(
            mapping.param_group_index, held.start, held.numel, parameter_start=mapping.lp_fragment_address.start
        )

    def read_loss_scaler(self) -> dict[str, float]:
        scaler = self._dynamic_loss_scaler()
        return {} if scaler is None else {name: getattr(scaler, name) for name in _LOSS_SCALER_STATE}

    def restore_loss_scaler(self, state: Mapping[str, float]) -> None:
        scaler = self._dynamic_loss_scaler()
        for name in _LOSS_SCALER_STATE if scaler is not None else ():
            if name in state:
                setattr(scaler, name, type(getattr(scaler, name))(state[name]))

    def _dynamic_loss_scaler(self) -> Any | None:
        scaler = getattr(self.wrapped.optimizer, "loss_scaler", None)
        return scaler if getattr(scaler, "dynamic", False) else None

    def observe(self, observer: StepObserver | None) -> None:
        """`PipelineEngine._exec_schedule` looks every instruction up in `_INSTRUCTION_MAP`. This engine has one of its
        own, so nothing of DeepSpeed's is copied and other engines are left alone (0.19.8, runtime/pipe/engine.py)."""
        self.wrapped._INSTRUCTION_MAP = self._instructions
        if observer is not None:
            self.wrapped._INSTRUCTION_MAP = {
                kind: _observed(kind.__name__, execute, observer) for kind, execute in self._instructions.items()
            }


def _move(micro_batches: Iterable[Any] | None, device: torch.device) -> Iterator[Any]:
    """Each micro-batch on the device by the time it is read there. The host does not wait for a copy of what is pinned;
    DeepSpeed would copy a pageable clone, and wait."""
    for halves in micro_batches or ():
        yield tuple(half and tuple(tensor.to(device, non_blocking=True) for tensor in half) for half in halves)


def _observed(unit: str, execute: Callable[..., None], observer: StepObserver) -> Callable[..., None]:
    def run(engine: PipelineEngine, **arguments: Any) -> None:
        observer.before(unit)
        execute(engine, **arguments)
        observer.after(unit)

    return run
