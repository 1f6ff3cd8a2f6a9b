"""The `Engine` over DeepSpeed's plain engine, for a model in one stage: it shards weights (ZeRO-3), which DeepSpeed's
pipeline engine does not.

Passes, losses and their scale are those of the pipeline. A step is a loop over micro-batches: the gradients of each are
summed over the replicas into this rank's shard, and freed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine
from torch.utils._python_dispatch import _disable_current_modes

from models.losses.cross_entropy import Loss
from training.distributed.process import has_accelerator
from training.distributed.topology import Layout
from training.engine.deepspeed_backed import DeepSpeedBacked, EngineKeys, move_micro_batches
from training.engine.deepspeed_config import build_deepspeed_config
from training.engine.deepspeed_internals import patch
from training.engine.engine import BACKWARD, FORWARD, OPTIMIZER, Engine, StepObserver
from training.optim.optimizer import build_optimizer, declare_state
from training.optim.parameter_groups import group_trained
from training.pipeline.module import StageModule
from training.pipeline.weight_sharding import whole_shape

# DeepSpeed's default for weights that are fetched before they are needed; in elements
PREFETCH = 50_000_000


class StageWithLoss(torch.nn.Module):
    """A whole model and its loss as one module: the engine hooks it and all its submodules."""

    def __init__(self, stage: StageModule) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, inputs: Any, labels: Any, loss: Loss | None = None) -> Any:
        return (loss or self.stage.loss_fn)(self.stage(inputs), labels)


def start_zero3(module: StageModule, config: EngineKeys, layout: Layout) -> Engine:
    """Build the ZeRO-3 engine for a model of one stage, with the optimizer over its parameters."""
    groups = [group for group in group_trained(module, config) if group["params"]]  # the same on all ranks
    settings = build_deepspeed_config(config, layout, has_accelerator=has_accelerator())
    settings["zero_optimization"]["stage3_prefetch_bucket_size"] = choose_prefetch(module)
    mpu = module.mpu()
    wrapped = DeepSpeedEngine(
        args=None,
        model=StageWithLoss(module),
        optimizer=build_optimizer(groups, config),
        mpu=mpu,
        config=settings,
        config_class=DeepSpeedConfig(settings, mpu),
    )
    hide_fetches(wrapped)
    return Zero3Engine(wrapped, module, layout, declare_state(config))


def choose_prefetch(module: StageModule) -> int:
    """Return the number of elements to fetch while a layer computes: as many as a layer has, on average. For a small
    model the default would be all of it, and the first layer would wait for the last."""
    num_elements = sum(whole_shape(parameter).numel() for parameter in module.parameters())
    return min(PREFETCH, num_elements // len(module.forward_funcs))


def hide_fetches(wrapped: DeepSpeedEngine) -> None:
    """Hide the fetching and freeing of weights from selective checkpointing.

    It counts the operations of a layer and expects as many when the layer is recomputed, but how many fetches happen
    within a layer depends on what was prefetched.
    """
    offload = wrapped.optimizer.parameter_offload
    for name in ("pre_sub_module_forward_function", "post_sub_module_forward_function"):
        patch(offload, name, _run_unseen(getattr(offload, name)))


def _run_unseen(function: Callable[[torch.nn.Module], None]) -> Callable[[torch.nn.Module], None]:
    def run(module: torch.nn.Module) -> None:
        with _disable_current_modes():
            function(module)

    return run


class Zero3Engine(DeepSpeedBacked):
    """The engine of a model in one stage whose weights are sharded over the replicas."""

    _observer: StepObserver | None = None

    def train_step(self, micro_batches: Iterator[Any], learning_rate: float, seed: int) -> torch.Tensor:
        self.start_step(learning_rate, seed)
        self.wrapped.train()
        batches = move_micro_batches(micro_batches, self.device)
        num_micro_batches = self.layout.gradient_accumulation_steps
        total = torch.zeros((), device=self.device)
        for number in range(num_micro_batches):
            inputs, labels = next(batches)
            with self._timed(FORWARD):
                loss = self.wrapped(inputs, labels)
            total += loss.detach().float().reshape(())
            with self._timed(BACKWARD):
                self.wrapped.backward(loss)
            if number < num_micro_batches - 1:
                self.wrapped.step()  # only counts
        with self._timed(OPTIMIZER):
            self.wrapped.step()
        dist.all_reduce(total)
        return total / (num_micro_batches * self.layout.num_weight_replicas)

    @torch.no_grad()
    def forward_only(
        self, micro_batches: Iterator[Any] | None, num_micro_batches: int, loss: Loss | None = None
    ) -> list[Any]:
        """All ranks run the same number of passes: each holds a part of every layer."""
        self.wrapped.eval()
        batches = move_micro_batches(micro_batches, self.device)
        outputs = []
        for _ in range(num_micro_batches):
            inputs, labels = next(batches)
            with self._timed(FORWARD):
                outputs.append(self.wrapped(inputs, labels, loss))
        self.wrapped.train()
        return outputs

    def observe(self, observer: StepObserver | None) -> None:
        self._observer = observer

    @contextmanager
    def _timed(self, unit: str) -> Iterator[None]:
        if self._observer is not None:
            self._observer.before(unit)
        yield
        if self._observer is not None:
            self._observer.after(unit)
