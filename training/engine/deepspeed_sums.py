"""Gradients summed where DeepSpeed's ZeRO-1 optimizers expect them: flat buffers (bf16), `grad_accum` (bf16, offloaded)
or `.grad` (fp32, fp16), and averaged by DeepSpeed after the last pass."""

from __future__ import annotations

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine

from training.engine.shard_groups import ShardGroups, average
from training.engine.zero_patches import free_gradients_by_bucket, skip_averaging, sum_by_one_function
from training.optim.gradient_sums import GradientSums, Half
from training.pipeline.module import StageModule


class DeepSpeedSums(GradientSums):
    """Hooks of DeepSpeed add most gradients as autograd computes them; the others are added when a pass ends."""

    def __init__(
        self,
        module: StageModule,
        wrapped: DeepSpeedEngine,
        num_replicas: int,
        reduce_dtype: torch.dtype,
        groups: ShardGroups | None,
    ) -> None:
        """groups: None where ZeRO partitions over all replicas. Raises UserError when a patched name is missing."""
        super().__init__(module, wrapped.optimizer)
        self._wrapped, self._reduce_dtype = wrapped, reduce_dtype
        self._is_flat = isinstance(self._optimizer, BF16_Optimizer)
        # A flat buffer is averaged over all replicas, whatever the groups that partition it
        self._groups = None if self._is_flat else groups
        self._averages = num_replicas > 1 or not self._is_flat
        sum_by_one_function(self._optimizer)
        free_gradients_by_bucket(self._optimizer)
        if num_replicas == 1 and not self._is_flat:
            skip_averaging(self._optimizer)
        self._positions = {
            id(parameter): (group, index)
            for group, parameters in enumerate(self._optimizer.bf16_groups if self._is_flat else ())
            for index, parameter in enumerate(parameters)
        }
        self._has_sweep = False

    def start_pass(self, chunk: int, half: Half) -> None:
        self._has_sweep = half is not Half.weights

    def add(self, parameter: torch.nn.Parameter) -> None:
        if self._is_flat:
            self._optimizer._update_hp_grad(parameter, *self._positions[id(parameter)], clear_lp_grads=False)
        elif self._optimizer.use_grad_accum_attribute:
            self._optimizer._fill_param_grad_accum_attribute(parameter)
        # else autograd itself adds to `.grad`, as the caller did

    def finish_pass(self) -> None:
        """Add every gradient that is still on its parameter: no hook has seen one that was assigned."""
        if not self._has_sweep:
            return
        if self._is_flat:
            for parameters in self._optimizer.bf16_groups:
                for parameter in parameters:
                    if parameter.grad is not None:
                        self.add(parameter)
        else:
            self._optimizer.backward_epilogue()  # does nothing in fp32 and fp16

    @torch.no_grad()
    def share_tied(self) -> None:
        """Zero first the flat sums that no micro-batch of this step reached: the whole buffer is averaged and used in
        the update."""
        if self._is_flat:
            optimizer = self._optimizer
            for sums, reached in zip(optimizer.fp32_groups_gradients, optimizer.fp32_groups_has_gradients, strict=True):
                for total, is_reached in zip(sums, reached, strict=True):
                    if not is_reached:
                        total.zero_()
        super().share_tied()

    def _find_sum(self, weight: torch.nn.Parameter) -> torch.Tensor | None:
        if not self._is_flat:
            return super()._find_sum(weight)
        group, index = self._positions[id(weight)]
        return self._optimizer.fp32_groups_gradients[group][index]

    def reduce(self) -> None:
        if self._averages:
            self._wrapped.allreduce_gradients()
        if self._groups is not None:
            for parts in self._optimizer.averaged_gradients.values():
                for part in parts:
                    average(part, self._groups.replicas, self._reduce_dtype)
