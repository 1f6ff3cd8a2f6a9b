"""Expert parallelism (2006.16668): the experts of a layer over several ranks, which otherwise have the same weights.

Of each stacked tensor of a layer's experts a rank has an equal run along the first dimension, and computes the rows of
all ranks for its experts (`models/experts/exchange.py`). A tensor's run is described by a `ShardSpec`, as those of
tensor parallelism are; all other parameters are whole on each rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PretrainedConfig

from errors import UserError
from models.architecture.alike import map_alike
from models.experts.grouped import is_stack
from models.experts.sizes import count_experts
from models.layers.decoder import PipelineDecoderLayer
from models.layers.layer import Layer
from models.parallel.shard import ExpertParallel, ShardSpec


def check_expert_parallel(config: PretrainedConfig, layers: Sequence[Layer], size: int) -> None:
    """Raise UserError for a model whose experts cannot be divided among `size` ranks."""
    if size == 1:
        return
    numbers = find_stack_sizes(layers)
    if not numbers and count_experts(config) == (1, 1):
        raise UserError(f"expert_parallel_size={size}: this '{config.model_type}' model has no experts; leave it at 1")
    if not numbers:
        raise UserError(
            f"expert_parallel_size={size}: the experts of a '{config.model_type}' are not in the stacked form that "
            "most families of transformers share, and only that is divided; leave it at 1, and give more num_stages"
        )
    common = math.gcd(*numbers)
    if common % size:
        fitting = ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
        found = " and ".join(map(str, sorted(numbers)))
        raise UserError(
            f"expert_parallel_size={size} does not divide the model's {found} experts; sizes that do: {fitting}"
        )


def find_stack_sizes(layers: Sequence[Layer]) -> set[int]:
    """Return the numbers of experts that the layers' stacks have; empty where no layer has one."""
    decoder = [layer for layer in layers if issubclass(layer.module_class, PipelineDecoderLayer)]
    numbers = map_alike(lambda layer: {part.num_experts for part in list_stacks(layer.build_on_meta())}, decoder)
    return set().union(*numbers)


def list_stacks(module: nn.Module) -> Iterator[Any]:
    """Yield the stacked experts of a layer's module."""
    return (part for part in module.modules() if is_stack(part))


def divide_experts(module: nn.Module, parallel: ExpertParallel) -> None:
    """Leave each stack of a layer's module, built on the meta device, this rank's run of experts."""
    if parallel.size == 1:
        return
    for experts in list_stacks(module):
        names = [name for name, each in experts.named_parameters(recurse=False) if len(each) == experts.num_experts]
        experts.expert_specs = {name: ShardSpec(0, (experts.num_experts,)) for name in names}
        experts.expert_parallel = parallel
        for name, spec in experts.expert_specs.items():
            setattr(experts, name, nn.Parameter(spec.take(getattr(experts, name).detach(), parallel)))


def find_own_experts(module: nn.Module, parallel: ExpertParallel) -> dict[str, range]:
    """Return the experts that this rank has of each stack of a layer, by the stack's name; empty where it has all."""
    return {
        name: range(*spec.intervals(parallel.rank, parallel.size)[0])
        for name, spec in list_expert_specs(module).items()
        if spec.dim == 0 and len(spec.sizes) == 1
    }


def divide_adapter(adapted: Any) -> None:
    """Describe the runs of the adapter that peft has added to this rank's run of experts: A is [r x E, in], expert
    after expert, B is [out, r x E], rank after rank (`models/experts/lora.py`)."""
    experts = adapted.get_base_layer()
    if not hasattr(experts, "expert_specs"):
        return
    for first, second in zip(adapted.lora_A.values(), adapted.lora_B.values(), strict=True):
        rank = len(first.weight) // (experts.num_experts // experts.expert_parallel.size)
        first.expert_specs = {"weight": ShardSpec(0, (rank * experts.num_experts,))}
        second.expert_specs = {"weight": ShardSpec(1, (experts.num_experts,) * rank)}


def list_expert_specs(module: nn.Module) -> dict[str, ShardSpec]:
    """Return the specs of a layer's tensors of which each rank has a run of experts, by name."""
    return {
        f"{prefix}." * bool(prefix) + name: spec
        for prefix, part in module.named_modules()
        for name, spec in getattr(part, "expert_specs", {}).items()  # type: ignore[union-attr]
    }


def gather_experts(spec: ShardSpec, run: torch.Tensor, parallel: ExpertParallel, owner: int) -> torch.Tensor | None:
    """Return the whole tensor, in the host's memory, on rank `owner` of the group; None on the others, which all call
    it. On the owner's device there is one other rank's run at a time."""
    if parallel.rank != owner:
        dist.send(run.contiguous(), group=parallel.group, group_dst=owner)
        return None
    shape = list(run.shape)
    shape[spec.dim] = spec.length
    whole = torch.empty(shape, dtype=run.dtype)
    received = torch.empty_like(run, memory_format=torch.contiguous_format)
    for rank in range(parallel.size):
        if rank != owner:
            dist.recv(received, group=parallel.group, group_src=rank)
        first, rows = 0, run if rank == owner else received
        for start, stop in spec.intervals(rank, parallel.size):
            whole.narrow(spec.dim, start, stop - start).copy_(rows.narrow(spec.dim, first, stop - start))
            first += stop - start
    return whole
