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
from deepspeed.runtime import bf16_optimizer, utils
from deepspeed.runtime.zero import stage_1_and_2

from training.engine.deepspeed_internals import patch


def avoid_host_waits() -> None:
    """Patch DeepSpeed for this process. Raises UserError when a patched name is missing."""
    for module in (utils, stage_1_and_2):
        patch(module, "mask_nan_or_inf_with_val_inplace", _mask_nonfinite)
    patch(stage_1_and_2, "is_invalid_grad_norm", _build_norm_check())
    patch(bf16_optimizer, "clip_tensors_by_global_norm", _clip)


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
