"""DeepSpeed's ZeRO optimizers, patched: how gradients are summed, what one replica need not do, and what offloading
need not keep on the card.

Each patch replaces something that is there. Where that is gone the run ends, since a name that nothing reads any more
would take the patch without effect.
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
    """For one replica, which has nothing to average: DeepSpeed would copy its gradients there and back, and round those
    of bf16 that are summed in fp32.

    What goes through a bucket (fp16, offloaded) is left alone: its gradients are handed on in the same pass.
    Raises UserError when DeepSpeed does not have what this replaces.
    """
    if engine.using_bf16_optimizer:
        patch(engine, "pipeline_enable_backward_allreduce", False)
    elif isinstance(engine.optimizer, DeepSpeedZeroOptimizer):
        if not engine.optimizer.contiguous_gradients:
            patch(engine.optimizer, "buffered_reduce_fallback", lambda *_, **__: None)
    elif engine.optimizer is not None:  # None of an engine that only evaluates
        raise explain_missing(
            "deepspeed",
            f"{DeepSpeedZeroOptimizer.__name__} here but a {type(engine.optimizer).__name__}",
            "not averaging a single replica",
        )


def free_gradients_by_bucket(optimizer: Any) -> None:
    """Makes the gradients that a bucket has reduced live until they have been copied to the host, and no longer.

    In bf16 with sums in fp32, `DeepSpeedZeroOptimizer` reduces into a buffer of this rank's whole part, n / dp numbers
    in fp32 on the card (0.19.8, runtime/zero/stage_1_and_2.py, `_build_compact_grad_partition_buffer`), though
    `copy_grads_in_partition` copies each parameter's to the host when its bucket is done: 30 GiB for a stage of
    8 billion parameters and dp = 1. Where a step is skipped it also keeps the buffer, and adds the next gradients to
    ones that were not finite. Other optimizers stay as they are.
    Raises UserError when DeepSpeed does not have what this replaces.
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
        if optimizer.is_gradient_accumulation_boundary():  # before it the host gets nothing
            reduced.pop(optimizer.get_param_id(param), None)

    patch(optimizer, "_get_compact_grad_partition_slice", get_slice)
    patch(optimizer, "copy_grads_in_partition", copy_and_drop)


def sum_by_one_function(optimizer: Any) -> None:
    """Makes DeepSpeed's optimizers add gradients with `add_gradient`. In fp32 and fp16 they stay as they are.

    Flat sums are not zeroed after a step: the first micro-batch of the next is written over them, and `end_sums` zeroes
    what no micro-batch has reached. The hooks that call it are DeepSpeed's: of `bf16.immediate_grad_update`, and,
    offloaded, those of `use_grad_accum_attribute` (0.19.8, runtime/bf16_optimizer.py,
    runtime/zero/stage_1_and_2.py).
    Raises UserError when DeepSpeed does not have what this replaces.
    """

    def add_to_flat(parameter: torch.nn.Parameter, group: int, index: int, clear_lp_grads: bool = False) -> None:
        """DeepSpeed's norm reads the flag, its sum over tied weights `_hp_grad`."""
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
    """Adds what still has a gradient when a backward pass ends."""
    if isinstance(optimizer, BF16_Optimizer):
        for group, parameters in enumerate(optimizer.bf16_groups):
            for index, parameter in enumerate(parameters):
                if parameter.grad is not None:
                    optimizer._update_hp_grad(parameter, group, index, clear_lp_grads=False)
    elif isinstance(optimizer, DeepSpeedZeroOptimizer):
        optimizer.backward_epilogue()  # does nothing in fp32 and fp16


@torch.no_grad()
def end_sums(optimizer: Any) -> None:
    """Zeroes the flat sums that got nothing in this step: what shares a buffer with them is averaged and updated as
    one."""
    if isinstance(optimizer, BF16_Optimizer):
        for sums, reached in zip(optimizer.fp32_groups_gradients, optimizer.fp32_groups_has_gradients, strict=True):
            for total, is_reached in zip(sums, reached, strict=True):
                if not is_reached:
                    total.zero_()


def build_adder(optimizer: Any) -> Callable[[torch.nn.Parameter], None]:
    """Adds the gradient of one parameter that no hook has seen, as `sweep_gradients` does."""
    if isinstance(optimizer, BF16_Optimizer):
        places = {
            id(parameter): (group, index)
            for group, parameters in enumerate(optimizer.bf16_groups)
            for index, parameter in enumerate(parameters)
        }

        def add(parameter: torch.nn.Parameter) -> None:
            optimizer._update_hp_grad(parameter, *places[id(parameter)], clear_lp_grads=False)

        return add
    if isinstance(optimizer, DeepSpeedZeroOptimizer) and optimizer.use_grad_accum_attribute:
        return lambda parameter: optimizer._fill_param_grad_accum_attribute(parameter)
    return lambda parameter: None  # autograd itself adds to `.grad`, and so did the caller


def sweep_after_backward(executed: Mapping[type, Instruction]) -> dict[type, Instruction]:
    """An engine's `_INSTRUCTION_MAP`, with `sweep_gradients` at the end of each backward pass and `end_sums` after the
    last. DeepSpeed has a sweep of its own on some stages only: the one with the loss, and without immediate updates the
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
        instructions.ReduceTiedGrads: end_and_reduce,  # the first instruction behind the passes
    }


def patch(patched: Any, name: str, value: Any) -> None:
    """Gives `patched`, an object or a module, another `name`. Raises UserError when it has none."""
    if not hasattr(patched, name):
        owner = getattr(patched, "__name__", type(patched).__name__)
        raise explain_missing("deepspeed", f"{owner}.{name}", "a patch of training/engine/")
    setattr(patched, name, value)
