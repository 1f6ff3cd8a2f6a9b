"""The optimizer step of DeepSpeed's ZeRO optimizer (stages 1 and 2) with one pass over the weights: a kernel clips a
gradient, updates, and rounds the new weight to its 16 bit copy, where DeepSpeed passes over gradients and weights once
for each (0.19.8, runtime/zero/stage_1_and_2.py, `step`)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.utils import all_gather_dp_groups

from training.engine.deepspeed_internals import patch
from training.optim.elementwise_update import ElementwiseOptimizer


def replace_step(zero: Any, parts: Sequence[torch.Tensor]) -> None:
    """Replace the step of DeepSpeed's optimizer `zero`, which wraps an `ElementwiseOptimizer`.

    parts: this rank's part of the reduced gradients of each parameter group, flat, whose norm `zero` has been patched
    to take. Raises UserError when a patched name is missing.
    """
    assert isinstance(zero.optimizer, ElementwiseOptimizer) and not zero.cpu_offload
    patch(zero, "step", partial(_take_step, zero, parts))


@torch.no_grad()
def _take_step(zero: Any, parts: Sequence[torch.Tensor], closure: None = None) -> None:
    assert closure is None
    zero.overflow = False
    zero.check_overflow()
    scale = zero.loss_scale
    zero._update_scale(zero.overflow)  # at the end of the step: `keep_scale`
    if zero.overflow:
        zero._global_grad_norm = float("inf")
        return
    zero._global_grad_norm = norm = zero.scaled_global_norm() / scale
    clip = torch.clamp((norm + 1e-6) / zero.clip_grad, min=1.0) if zero.clip_grad > 0 else torch.ones(())
    factor = float(1.0 / (clip * scale))
    for number, (group, part) in enumerate(zip(zero.optimizer.param_groups, parts, strict=True)):
        rank = dist.get_rank(group=zero.real_dp_process_group[number])
        copy = zero.parallel_partitioned_bit16_groups[number][rank]
        zero.optimizer.update(group, zero.single_partition_of_fp32_groups[number], part, factor, copy.detach())
    zero._lazy_init_hp_params_optimizer_state()  # as DeepSpeed does after a first step
    all_gather_dp_groups(
        groups_flat=zero.bit16_groups_flat,
        partitioned_param_groups=zero.parallel_partitioned_bit16_groups,
        dp_process_group=zero.real_dp_process_group,
        start_alignment_factor=zero.nccl_start_alignment_factor,
        allgather_bucket_size=zero.allgather_bucket_size,
    )
    for number in range(len(parts)):
        zero._update_model_bit16_weights(number)
