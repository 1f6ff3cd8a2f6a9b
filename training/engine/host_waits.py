"""Patches that keep DeepSpeed's step from making the host wait for the device: the GPU is soon idle while its host
waits.

Two waits remain in a step: DeepSpeed checks whether the gradient norm is finite, and the run checks the loss. The first
pass of a run also copies the rotary frequencies, and reports, evaluations and saves wait for the values they read.
tests/training/engine/test_device.py counts the waits of a later step, on a device that is not the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime import bf16_optimizer, utils
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.zero import stage_1_and_2

from training.distributed.process import make_host_group
from training.engine.zero_patches import patch


def avoid_host_waits(engine: DeepSpeedEngine) -> None:
    """Patch DeepSpeed for this process. All ranks call it. Raises UserError when a patched name is missing."""
    if isinstance(engine, PipelineEngine):
        _exchange_shapes_on_host(engine)
        patch(engine, "_aggregate_total_loss", lambda: _average_loss(engine))
    for module in (utils, stage_1_and_2):
        patch(module, "mask_nan_or_inf_with_val_inplace", _mask_nonfinite)
    patch(stage_1_and_2, "is_invalid_grad_norm", _build_norm_check())
    patch(bf16_optimizer, "clip_tensors_by_global_norm", _clip)


def _exchange_shapes_on_host(engine: PipelineEngine) -> None:
    """Shapes are sent across a boundary once per step where lengths vary. DeepSpeed sends them as a tensor on the
    device, and reads it there number by number: over 20 waits (0.19.8, `_recv_tensor_meta`)."""
    group = make_host_group()

    def send(tensors: Sequence[torch.Tensor], stage_id: int) -> None:
        shapes = [(list(tensor.shape), tensor.dtype) for tensor in tensors]
        dist.send_object_list([shapes], engine.grid.stage_to_global(stage_id=stage_id), group)

    def receive(stage_id: int) -> tuple[torch.Tensor, ...]:
        received: list[Any] = [None]
        dist.recv_object_list(received, engine.grid.stage_to_global(stage_id=stage_id), group)
        return tuple(
            engine._allocate_or_extend_buffers(number, shape, dtype)
            for number, (shape, dtype) in enumerate(received[0])
        )

    patch(engine, "_send_tensor_meta", send)
    patch(engine, "_recv_tensor_meta", receive)


def _average_loss(engine: PipelineEngine) -> torch.Tensor:
    """The mean loss over the step's micro-batches and replicas, a scalar, on every rank."""
    mean = torch.zeros((), device=engine.device)
    if engine.is_last_stage():
        mean = (engine.total_loss.detach() / engine.gradient_accumulation_steps()).float().reshape(())
        if engine.is_data_parallel:
            dist.all_reduce(mean, group=engine.mpu.get_data_parallel_group())
            mean /= engine.dp_world_size
    if engine.is_pipe_parallel:
        dist.broadcast(mean, engine._loss_stage_global_rank(), engine.mpu.get_pipe_parallel_group())
    return mean


def _mask_nonfinite(input: torch.Tensor, device: torch.device | None = None, val: float = -1.0) -> None:
    """Like DeepSpeed's, which creates the value on the host and copies it."""
    input.masked_fill_(input.isfinite().logical_not_(), val)


def _build_norm_check() -> Callable[[Any], bool]:
    """Like DeepSpeed's, which reads the same norm from the device again for each parameter group that it clips."""
    checked: Any = None
    result = False

    def is_invalid(norm: Any) -> bool:
        nonlocal checked, result
        if norm is not checked:
            checked, result = norm, utils.is_invalid_grad_norm(norm)
        return result

    return is_invalid


def _clip(
    input_tensors: Sequence[torch.Tensor],
    max_norm: float = 1.0,
    global_norm: torch.Tensor | None = None,
    mpu: Any = None,
    eps: float = 1e-6,
) -> torch.Tensor:
    """Like DeepSpeed's, which reads from the device whether the norm exceeds the limit; a factor of 1 changes
    nothing."""
    if global_norm is None:
        global_norm = utils.get_global_norm_of_tensors(input_tensors, mpu=mpu)
    factor = (max_norm / (global_norm + eps)).clamp(max=1.0)
    torch._foreach_mul_([tensor.detach() for tensor in input_tensors], factor)
    return global_norm
