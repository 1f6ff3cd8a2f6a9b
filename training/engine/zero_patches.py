"""Patches of DeepSpeed's ZeRO optimizers: how gradients are accumulated, what a single replica need not do, and what
offloading need not keep on the GPU.

Each patch replaces an existing name. Where that is missing the run ends: nothing would read the patched name any more,
and the patch would silently have no effect.
"""

from __future__ import annotations

from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from training.engine.deepspeed_internals import explain_missing, patch
from training.optim.gradient_sums import add_gradient


def skip_averaging(optimizer: Any) -> None:
    """Turn off averaging for a single replica: DeepSpeed would copy its gradients into a buffer and back.

    Gradients that go through a bucket (fp16, offloaded) keep DeepSpeed's path, which also passes them on.
    Raises UserError when a patched name is missing.
    """
    if not isinstance(optimizer, DeepSpeedZeroOptimizer):
        name = type(optimizer).__name__
        raise explain_missing("deepspeed", f"DeepSpeedZeroOptimizer here but a {name}", "not averaging one replica")
    if not optimizer.contiguous_gradients:
        patch(optimizer, "buffered_reduce_fallback", lambda *_, **__: None)


def free_gradients_by_bucket(optimizer: Any) -> None:
    """Free the gradients that a bucket has reduced as soon as they have been copied to the host.

    In bf16 with fp32 accumulation, `DeepSpeedZeroOptimizer` reduces into a buffer of this rank's whole part, n / dp
    numbers in fp32 on the GPU (0.19.8, runtime/zero/stage_1_and_2.py, `_build_compact_grad_partition_buffer`), though
    `copy_grads_in_partition` copies each parameter's gradient to the host when its bucket is done: 30 GiB for a stage
    of 8 billion parameters and dp = 1. When a step is skipped it also keeps the buffer, and adds the next gradients to
    ones that were not finite. Other optimizers are not changed.
    Raises UserError when a patched name is missing.
    """
    if not (isinstance(optimizer, DeepSpeedZeroOptimizer) and optimizer.cpu_offload):
        return
    reduced: dict[int, torch.Tensor] = {}  # parameter -> this rank's part of its gradient, flat
    copy_to_host = optimizer.copy_grads_in_partition

    def get_slice(group_idx: int, partition_id: int, param_id: int, num_elements: int) -> torch.Tensor | None:
        if not optimizer._use_compact_grad_partition_buffer(group_idx) or partition_id != dist.get_rank(
            optimizer.real_dp_process_group[group_idx]
        ):
            return None
        if param_id not in reduced:
            device = optimizer.bit16_groups[group_idx][0].device
            reduced[param_id] = torch.zeros(
                int(num_elements), dtype=optimizer.gradient_accumulation_dtype, device=device
            )
        assert reduced[param_id].numel() == num_elements
        return reduced[param_id]

    def copy_and_drop(param: torch.nn.Parameter, group_idx: int | None = None) -> None:
        copy_to_host(param, group_idx)
        if optimizer.is_gradient_accumulation_boundary():  # nothing is copied to the host before it
            reduced.pop(optimizer.get_param_id(param), None)

    patch(optimizer, "_get_compact_grad_partition_slice", get_slice)
    patch(optimizer, "copy_grads_in_partition", copy_and_drop)


def sum_by_one_function(optimizer: Any) -> None:
    """Make DeepSpeed's optimizers accumulate gradients with `add_gradient`. In fp32 and fp16 nothing changes.

    Flat accumulated gradients are not zeroed after a step: the first micro-batch of the next step overwrites them, and
    `DeepSpeedSums.share_tied` zeroes those that no micro-batch reached. The hooks that call it are DeepSpeed's: those
    of `bf16.immediate_grad_update`, and, offloaded, of `use_grad_accum_attribute` (0.19.8, runtime/bf16_optimizer.py,
    runtime/zero/stage_1_and_2.py).
    Raises UserError when a patched name is missing.
    """

    def add_to_flat(parameter: torch.nn.Parameter, group: int, index: int, clear_lp_grads: bool = False) -> None:
        """DeepSpeed's norm reads the flag."""
        if parameter.grad is not None:
            reached = optimizer.fp32_groups_has_gradients[group]
            add_gradient(parameter, optimizer.fp32_groups_gradients[group][index], not reached[index])
            reached[index] = True

    def forget_flat() -> None:
        optimizer.fp32_groups_has_gradients[:] = [
            [False] * len(reached) for reached in optimizer.fp32_groups_has_gradients
        ]

    def add_to_attribute(parameter: torch.nn.Parameter) -> None:
        if parameter.grad is not None:
            parameter.grad_accum = add_gradient(parameter, parameter.grad_accum)  # type: ignore[attr-defined]

    if isinstance(optimizer, BF16_Optimizer):
        patch(optimizer, "_update_hp_grad", add_to_flat)
        patch(optimizer, "accumulate_hp_grads_and_remove_lp", add_to_flat)  # what its hooks call
        patch(optimizer, "clear_hp_grads", forget_flat)
    elif isinstance(optimizer, DeepSpeedZeroOptimizer) and optimizer.use_grad_accum_attribute:
        patch(optimizer, "_fill_param_grad_accum_attribute", add_to_attribute)
