"""Patches of DeepSpeed's ZeRO optimizers: how gradients are accumulated, what a single replica need not do, and what
offloading need not keep on the GPU.

Each patch replaces an existing name. Where that is missing the run ends: nothing would read the patched name any more,
and the patch would silently have no effect.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.pipe import schedule as instructions
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from training.engine.deepspeed_internals import explain_missing
from training.optim.gradient_sums import add_gradient

Instruction = Callable[..., None]


def skip_averaging(engine: PipelineEngine) -> None:
    """Turn off averaging for a single replica: DeepSpeed would copy its gradients into a buffer and back, and round
    accumulated fp32 gradients to bf16.

    Gradients that go through a bucket (fp16, offloaded) keep DeepSpeed's path, which also passes them on.
    Raises UserError when a patched name is missing.
    """
    if engine.using_bf16_optimizer:
        patch(engine, "pipeline_enable_backward_allreduce", False)
    elif isinstance(engine.optimizer, DeepSpeedZeroOptimizer):
        if not engine.optimizer.contiguous_gradients:
            patch(engine.optimizer, "buffered_reduce_fallback", lambda *_, **__: None)
    elif engine.optimizer is not None:  # None in an engine that only evaluates
        raise explain_missing(
            "deepspeed",
            f"{DeepSpeedZeroOptimizer.__name__} here but a {type(engine.optimizer).__name__}",
            "not averaging a single replica",
        )


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
    `end_sums` zeroes those that no micro-batch reached. The hooks that call it are DeepSpeed's: those of
    `bf16.immediate_grad_update`, and, offloaded, of `use_grad_accum_attribute` (0.19.8, runtime/bf16_optimizer.py,
    runtime/zero/stage_1_and_2.py).
    Raises UserError when a patched name is missing.
    """

    def add_to_flat(parameter: torch.nn.Parameter, group: int, index: int, clear_lp_grads: bool = False) -> None:
        """DeepSpeed's norm reads the flag; its reduction of tied gradients reads `_hp_grad`."""
        if parameter.grad is not None:
            reached = optimizer.fp32_groups_has_gradients[group]
            total = add_gradient(parameter, optimizer.fp32_groups_gradients[group][index], not reached[index])
            reached[index] = True
            parameter._hp_grad = total  # type: ignore[attr-defined]

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


def sweep_gradients(optimizer: Any) -> None:
    """Accumulate every gradient that is still on its parameter when a backward pass ends."""
    if isinstance(optimizer, BF16_Optimizer):
        for group, parameters in enumerate(optimizer.bf16_groups):
            for index, parameter in enumerate(parameters):
                if parameter.grad is not None:
                    optimizer._update_hp_grad(parameter, group, index, clear_lp_grads=False)
    elif isinstance(optimizer, DeepSpeedZeroOptimizer):
        optimizer.backward_epilogue()  # does nothing in fp32 and fp16


@torch.no_grad()
def end_sums(optimizer: Any) -> None:
    """Zero the flat accumulated gradients that no micro-batch of this step reached: the whole buffer is averaged and
    used in the update."""
    if isinstance(optimizer, BF16_Optimizer):
        for sums, reached in zip(optimizer.fp32_groups_gradients, optimizer.fp32_groups_has_gradients, strict=True):
            for total, is_reached in zip(sums, reached, strict=True):
                if not is_reached:
                    total.zero_()


def build_adder(optimizer: Any) -> Callable[[torch.nn.Parameter], None]:
    """Return a function that accumulates a parameter's gradient that no hook has seen, as `sweep_gradients` does."""
    if isinstance(optimizer, BF16_Optimizer):
        positions = {
            id(parameter): (group, index)
            for group, parameters in enumerate(optimizer.bf16_groups)
            for index, parameter in enumerate(parameters)
        }

        def add(parameter: torch.nn.Parameter) -> None:
            optimizer._update_hp_grad(parameter, *positions[id(parameter)], clear_lp_grads=False)

        return add
    if isinstance(optimizer, DeepSpeedZeroOptimizer) and optimizer.use_grad_accum_attribute:
        return lambda parameter: optimizer._fill_param_grad_accum_attribute(parameter)
    return lambda parameter: None  # autograd itself adds to `.grad`, as the caller did


def sweep_after_backward(executed: Mapping[type, Instruction]) -> dict[type, Instruction]:
    """Return an `_INSTRUCTION_MAP` with `sweep_gradients` at the end of each backward pass and `end_sums` after the
    last. DeepSpeed's own sweep runs on some stages only: the one with the loss, and without immediate updates the
    others."""
    run_backward, reduce_tied = executed[instructions.BackwardPass], executed[instructions.ReduceTiedGrads]

    def run_and_sweep(engine: PipelineEngine, **arguments: Any) -> None:
        run_backward(engine, **arguments)
        sweep_gradients(engine.optimizer)

    def end_and_reduce(engine: PipelineEngine, **arguments: Any) -> None:
        end_sums(engine.optimizer)
        reduce_tied(engine, **arguments)

    return {
        **executed,
        instructions.BackwardPass: run_and_sweep,
        instructions.ReduceTiedGrads: end_and_reduce,  # the first instruction after the passes
    }


def patch(patched: Any, name: str, value: Any) -> None:
    """Replace the attribute `name` of `patched`, an object or a module. Raises UserError when it does not exist."""
    if not hasattr(patched, name):
        owner = getattr(patched, "__name__", type(patched).__name__)
        raise explain_missing("deepspeed", f"{owner}.{name}", "a patch of training/engine/")
    setattr(patched, name, value)
