"""Base class of the engines over DeepSpeed: everything that depends on its optimizer alone, not on how passes run."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from data.loading.step_totals import StepTotals
from models.layers.documents import DocumentBounds
from training.config.schema import RunConfig
from training.distributed.topology import TENSOR, Layout, Topology
from training.engine.deepspeed_internals import patch
from training.engine.engine import Engine, Partition, PartitionSlice
from training.engine.partitions import build_partition_view
from training.optim.lr_schedule import learning_rate_at
from training.optim.parameter_groups import LR_RATIO
from training.optim.state_kinds import DeclaredState
from training.pipeline.module import StageModule

# The attributes of DeepSpeed's DynamicLossScaler that change (fp16; deepspeed 0.19.8). The config sets the others.
_LOSS_SCALER_STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def keep_scale(zero: Any) -> None:
    """Let a step of DeepSpeed's optimizer change the loss scale at its end. It does so before it divides gradients by
    the scale (0.19.8, zero/stage_1_and_2.py, `step`): whenever the scale grows, half of every gradient would be lost.
    Raises UserError when a patched name is missing."""
    step, update = zero.step, zero._update_scale
    overflows: list[bool] = []

    def take_step(*arguments: Any) -> None:
        step(*arguments)
        while overflows:
            update(overflows.pop())

    patch(zero, "_update_scale", overflows.append)
    patch(zero, "step", take_step)


class DeepSpeedBacked(Engine):
    """An `Engine` that delegates to `wrapped`, DeepSpeed's engine, which holds the optimizer.

    kept: the optimizer state that is declared for each parameter.
    """

    def __init__(
        self, wrapped: Any, module: StageModule, layout: Layout, config: RunConfig, kept: DeclaredState
    ) -> None:
        self.wrapped, self.module, self.layout, self._config = wrapped, module, layout, config
        self.device, self.rank = wrapped.device, dist.get_rank()
        self._held = build_partition_view(wrapped.optimizer, kept)

    def start_step(self, step: int, total_steps: int, totals: StepTotals | None, is_last: bool = False) -> float:
        """Set what follows from a step's number and its global batch: the learning rate, which is returned, random
        numbers, and what layers and routers know of documents and tokens. Arguments as in `train_step`."""
        learning_rate = learning_rate_at(step, total_steps, self._config)
        for group in self.wrapped.optimizer.param_groups:
            group["lr"] = learning_rate * group[LR_RATIO]
        self.module.expect_documents(None if totals is None else bound_documents(totals))
        self.module.seed_noise(hash((self._config.seed, step)))
        if self.module.routers is not None:
            loss_scale = self.read_loss_scaler().get("cur_scale", 1.0)
            is_logged = is_last or (step + 1) % self._config.logging_steps == 0
            self.module.routers.start_step(totals, loss_scale * self.layout.num_weight_replicas, compares=is_logged)
        torch.manual_seed(choose_seed(self._config, self.layout.topology, self.rank, step))
        return learning_rate

    def gradient_norm(self) -> torch.Tensor:
        """Return infinity for a skipped step, of which some of DeepSpeed's optimizers keep no norm (0.19.8,
        zero/stage3.py, `step`)."""
        if self.has_skipped_step():
            return torch.tensor(float("inf"), dtype=torch.float64)
        return torch.as_tensor(self.wrapped.get_global_grad_norm(), dtype=torch.float64)

    def has_skipped_step(self) -> bool:
        """Return DeepSpeed's overflow flag: when the gradient norm is not finite its optimizers leave weights and
        moments unchanged and continue silently (DeepSpeed issue #8415)."""
        return self.wrapped.optimizer.overflow

    def restore_step(self, step: int) -> None:
        self.wrapped.global_steps = step
        self.wrapped.global_samples = step * self.layout.global_batch_size

    def list_partitions(self) -> list[Partition]:
        return self._held.list_partitions()

    def restore_state(self, partition: int, state: Mapping[str, Any]) -> None:
        self.wrapped.optimizer.optimizer.state[self.list_partitions()[partition].weights].update(state)

    def find_slice(self, parameter: torch.nn.Parameter) -> PartitionSlice | None:
        return self._held.find_slice(parameter) if parameter.requires_grad else None

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


def bound_documents(totals: StepTotals) -> DocumentBounds | None:
    """Return bounds on the documents of a step's micro-batches; None where the host does not know them."""
    return DocumentBounds(totals.most_documents, totals.longest_document) if totals.most_documents else None


def choose_seed(config: RunConfig, topology: Topology, rank: int, step: int) -> int:
    """Return the seed of the random numbers that a rank draws in a step. Ranks that share layers need the same dropout
    mask for activations they all hold, and different ones for parts of sequences."""
    alike = () if config.sequence_parallel else (TENSOR,)
    return hash((config.seed, step, topology.index(rank, *topology.others(*alike)))) % 2**63


def configure_gc(settings: Mapping[str, Any]) -> None:
    """Turn off Python's cyclic garbage collection where `deepspeed.disable_python_gc` asks for that, as
    `deepspeed.initialize` does (0.19.8)."""
    if settings.get("disable_python_gc"):
        gc.collect()
        gc.disable()
