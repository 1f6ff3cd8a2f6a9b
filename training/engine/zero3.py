"""Weights sharded over the replicas (ZeRO-3), for a model in one stage: DeepSpeed's own, whose hooks fetch the weights
of a layer before its passes and free them afterwards, and sum the gradients of each micro-batch into this rank's shard.

The loop over passes is that of the pipeline (`training/engine/runner.py`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine
from torch.utils._python_dispatch import _disable_current_modes

from training.config.schema import RunConfig
from training.distributed.process import has_accelerator, has_triton
from training.distributed.topology import Layout
from training.engine.deepspeed_backed import configure_gc
from training.engine.deepspeed_config import build_deepspeed_config
from training.engine.deepspeed_internals import patch
from training.engine.engine import Engine
from training.engine.pipeline_engine import PipelineStage
from training.engine.runner import StageWithLoss
from training.optim.optimizer import build_optimizer
from training.optim.parameter_groups import group_trained
from training.pipeline.module import StageModule
from training.pipeline.weight_sharding import whole_shape

# DeepSpeed's default for weights that are fetched before they are needed; in elements
PREFETCH = 50_000_000


def start_zero3(module: StageModule, config: RunConfig, layout: Layout) -> Engine:
    """Build the ZeRO-3 engine for a model of one stage, with the optimizer over its parameters."""
    groups = [group for group in group_trained(module, config) if group["params"]]  # the same on all ranks
    settings = build_deepspeed_config(config, layout, has_accelerator=has_accelerator())
    settings["zero_optimization"]["stage3_prefetch_bucket_size"] = choose_prefetch(module)
    mpu = module.mpu()
    wrapped = DeepSpeedEngine(
        args=None,
        model=StageWithLoss(module),
        optimizer=build_optimizer(groups, config, has_triton()),
        mpu=mpu,
        config=settings,
        config_class=DeepSpeedConfig(settings, mpu),
    )
    configure_gc(settings)
    hide_fetches(wrapped)
    wait_on_device(wrapped)
    return PipelineStage(
        wrapped,
        module,
        layout,
        config,
        model=wrapped,
        gradients=Zero3Gradients(wrapped, layout.gradient_accumulation_steps),
        update=wrapped.step,
    )


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


def wait_on_device(wrapped: DeepSpeedEngine) -> None:
    """Let the stream that uses reduced gradients wait for them, in place of the host.

    At the end of each backward pass DeepSpeed's host waits for the stream that reduces (0.19.8, zero/stage3.py,
    `independent_gradient_partition_epilogue`), and launches nothing of the next pass meanwhile. What follows reads
    gradients on the device alone: optimizer state on the host is refused with stage 3. How many reductions the host may
    be ahead is still bounded (`max_param_reduce_events`).
    """
    accelerator = get_accelerator()
    if accelerator.resolves_data_dependency():  # it has no streams
        return

    class ReductionStream(accelerator.Stream):  # type: ignore[misc, name-defined]
        def synchronize(self) -> None:
            accelerator.current_stream().wait_stream(self)

    patch(wrapped.optimizer, "reduce_and_partition_stream", ReductionStream())


class Zero3Gradients:
    """The gradients of a step (`StepGradients`): DeepSpeed's hooks sum them."""

    def __init__(self, wrapped: DeepSpeedEngine, num_micro_batches: int) -> None:
        self._wrapped, self._num_micro_batches = wrapped, num_micro_batches
        self._number = 0  # of the running pass, from 1

    def start_step(self) -> None:
        self._number = 0

    def start_pass(self) -> None:
        self._number += 1

    def backward(self, loss: torch.Tensor) -> None:
        self._wrapped.backward(loss, scale_wrt_gas=False)

    def finish_pass(self) -> None:
        if self._number < self._num_micro_batches:
            self._wrapped.step()  # only counts

    def add(self, parameter: torch.nn.Parameter) -> None: ...

    def lend_sum(self, parameter: torch.nn.Parameter) -> None: ...

    def share_tied(self) -> None: ...

    def reduce(self) -> None: ...
