"""The one place that starts DeepSpeed's pipeline engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from console import progress
from training.config.schema import OptimizerName, PadTo, RunConfig
from training.distributed.topology import Layout
from training.engine.deepspeed_config import build_deepspeed_config
from training.engine.executor import ScheduleEngine
from training.engine.lr_schedule import learning_rate_at
from training.engine.zero_patches import free_gradients_by_bucket
from training.pipeline.module import StageModule
from training.pipeline.schedule import build_schedule

# A process that joins without a GPU builds and loads DeepSpeed's op for `inference_all_reduce`, which nothing here calls: 25 s of
# compiling once, and a rank that is killed meanwhile (as the others are when one finds a mistake) leaves a lock on which every later
# run hangs without a word (torch's FileBaton; seen with deepspeed 0.19.8). No op counts as compatible, so none is built.
deepspeed.ops.__compatible_ops__ = {}


def initialize_engine(module: StageModule, config: RunConfig, layout: Layout, trains: bool = True) -> PipelineEngine:
    """Wraps the stage in DeepSpeed's engine, with the optimizer over this stage's parameters, or without one when it only evaluates."""
    optimizer, settings = (
        build_optimizer(module, config) if trains else None,
        build_deepspeed_config(config, layout, trains),
    )
    assert layout.schedule == config.schedule, f"the layout is not yet scheduled: {layout}"
    schedule = build_schedule(layout)
    if schedule.runs_on_deepspeed:
        engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=settings)
    else:
        engine = ScheduleEngine(module, optimizer, settings, schedule)
    free_gradients_by_bucket(engine.optimizer)
    if layout.dp_size == 1:
        skip_averaging(engine)
    return engine


def skip_averaging(engine: PipelineEngine) -> None:
    """For one replica, which has nothing to average: DeepSpeed would copy its gradients there and back, and round those of bf16, summed in fp32.

    What goes through a bucket (fp16, offloaded) is left alone: its gradients are handed on in the same pass.
    """
    if engine.using_bf16_optimizer:
        engine.pipeline_enable_backward_allreduce = False
    elif isinstance(engine.optimizer, DeepSpeedZeroOptimizer) and not engine.optimizer.contiguous_gradients:
        engine.optimizer.buffered_reduce_fallback = lambda *_, **__: None


def build_optimizer(module: torch.nn.Module, config: RunConfig) -> torch.optim.Optimizer:
    """AdamW or plain SGD, torch's own: the fused kernels run on a GPU and, when the state is offloaded, on the host, and nothing is
    compiled on first use. Vectors (norms, biases) do not decay."""
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in trainable if p.ndim <= 1], "weight_decay": 0.0},
    ]
    options: dict[str, Any] = {"lr": config.learning_rate}
    if config.optimizer.name is OptimizerName.sgd:
        return torch.optim.SGD(groups, **options)
    options |= {"betas": tuple(config.optimizer.betas), "eps": config.optimizer.eps}
    return torch.optim.AdamW(groups, fused=True, **options)


def train_step(
    engine: PipelineEngine, micro_batches: Iterator[Any], config: RunConfig, step: int, total_steps: int
) -> tuple[torch.Tensor, float]:
    """Optimizer step `step` (from 0) of a schedule of `total_steps`: the loss, still on the device, and the learning rate.

    Learning rate and random numbers (dropout) are functions of the step, so a resumed run has neither to restore.
    """
    learning_rate = learning_rate_at(step, total_steps, config)
    for group in engine.optimizer.param_groups:
        group["lr"] = learning_rate
    # The ranks that share layers drop the same places of what all of them hold.
    torch.manual_seed(hash((config.seed, step, engine.global_rank // config.tensor_parallel_size)) % 2**63)
    if config.data.pad_to is PadTo.longest:
        engine.reset_activation_shape()  # the length changes from step to step; shapes are sent once a step
    loss = engine.train_batch(micro_batches)
    return loss, learning_rate


def is_nonfinite(engine: PipelineEngine, loss: torch.Tensor) -> bool:
    """Whether the step that has just ended had a loss or a gradient that is not finite; another rank may know more.

    DeepSpeed's optimizers leave weights and moments as they were when the norm of the gradient is not finite, and go on without a
    word (DeepSpeed issue #8415). In fp16 that is how the loss scale finds its place, so there only the loss counts.
    """
    overflow = getattr(engine.optimizer, "overflow", False) and not engine.fp16_enabled()
    return overflow or not loss.isfinite().all().item()


def evaluate(
    engine: PipelineEngine, micro_batches: Iterator[Any] | None, num_micro_batches: int, num_terms: int
) -> float:
    """Mean loss a target token, or a pair, over the evaluation set; the same on every rank.

    micro_batches: of this rank's loader, whose loss is a sum; None on a rank that reads nothing.
    num_micro_batches, num_terms: of one pipeline, of the whole set; the same on every rank.
    """
    total = torch.zeros((), dtype=torch.float64, device=engine.device)
    with progress("evaluating", num_micro_batches, "micro-batches", shown=engine.global_rank == 0) as told:
        followed = None if micro_batches is None else told.follow(micro_batches)
        for output in run_forward(engine, followed, num_micro_batches):
            if engine.module.reports_loss:
                total += output.double()
    dist.all_reduce(total)
    return total.item() / num_terms


def run_forward(
    engine: PipelineEngine, micro_batches: Iterator[Any] | None, num_micro_batches: int
) -> list[torch.Tensor]:
    """What the loss makes of each micro-batch, without gradients; nothing on a rank that does not hold it."""
    engine.reset_activation_shape()  # other shapes than in training
    outputs = engine.eval_batch(
        micro_batches, reduce_output=None, bcast_loss=False, num_micro_batches=num_micro_batches
    )
    engine.reset_activation_shape()
    return outputs if engine.module.has_loss else []
