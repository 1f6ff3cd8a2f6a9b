"""What offloading leaves on the card, made less: DeepSpeed keeps there what it has sent to the host already."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer


def free_gradients_by_bucket(optimizer: Any) -> None:
    """Makes the gradients that a bucket has reduced live until they have been copied to the host, and no longer.

    In bf16 with sums in fp32, `DeepSpeedZeroOptimizer` reduces into a buffer of this rank's whole part, n / dp numbers in fp32 on the card
    (0.19.8, runtime/zero/stage_1_and_2.py, `_build_compact_grad_partition_buffer`), though `copy_grads_in_partition` copies each parameter's
    to the host when its bucket is done: 30 GiB for a stage of 8 billion parameters and dp = 1. Where a step is left out it also keeps the buffer, and adds the next gradients to ones that were not finite. Other optimizers, and
    releases of DeepSpeed without that buffer, stay as they are.
    """
    if not (
        isinstance(optimizer, DeepSpeedZeroOptimizer)
        and optimizer.cpu_offload
        and hasattr(optimizer, "_get_compact_grad_partition_slice")
    ):
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
        if optimizer.is_gradient_accumulation_boundary():  # before it the host gets nothing
            reduced.pop(optimizer.get_param_id(param), None)

    optimizer._get_compact_grad_partition_slice, optimizer.copy_grads_in_partition = get_slice, copy_and_drop
