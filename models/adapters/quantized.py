"""QLoRA (2305.14314): the frozen projections and experts of a layer in nf4 with double quantization, through
bitsandbytes. Projections are its own modules; stacks of experts are dequantized a chunk at a time
(`models/experts/frozen.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from models.adapters.targets import list_adaptable, list_projections
from models.experts.frozen import FORMS, FrozenStack, count_chunk, count_stack_bytes
from models.experts.grouped import is_stack
from models.layers import nf4
from models.sharding.expert_parallel import list_stacks


def quantize_projections(module: nn.Module) -> None:
    """Replace the projections of a layer, whose weights are loaded, by nf4 ones (with double quantization) that compute
    in the old dtype.
    """
    from bitsandbytes.nn import Linear4bit, Params4bit

    nf4.correct_cpu_kernel()
    for name, linear in list_projections(module).items():
        weight = linear.weight
        quantized = Linear4bit(
            linear.in_features,
            linear.out_features,
            linear.bias is not None,
            compute_dtype=weight.dtype,
            quant_type="nf4",
            device="meta",
        )
        packed = Params4bit(weight.data, requires_grad=False, quant_type="nf4", module=quantized)
        quantized.weight = packed.to(weight.device)  # type: ignore[misc]
        # On some CPUs bitsandbytes (0.50.2) repacks the weights in the first pass of an evaluation, for good, and for
        # kernels that have no backward pass
        quantized.support_avx512bf16_for_cpu = False
        quantized.bias = linear.bias
        module.set_submodule(name, quantized)
    module.is_loaded_in_4bit = True  # type: ignore[assignment]  # peft asks for it before it puts an adapter on such a projection


@dataclass(frozen=True)
class Replacement:
    """A quantized stack, and the module and name of the parameter whose place it takes."""

    experts: nn.Module
    name: str
    stack: FrozenStack

    def replace(self) -> None:
        """Put the stack in the place of the parameter."""
        delattr(self.experts, self.name)
        setattr(self.experts, self.name, self.stack)


def find_places(module: nn.Module, stacks: Mapping[str, FrozenStack]) -> list[Replacement]:
    """Return the places of stacks in a layer's module, by their names in it, before an adapter changes those."""
    owners = ((name.rpartition("."), stack) for name, stack in stacks.items())
    return [Replacement(module.get_submodule(prefix), own, stack) for (prefix, _, own), stack in owners]


@torch.no_grad()
def quantize_stacks(module: nn.Module) -> dict[str, FrozenStack]:
    """Quantize the stacks of experts of a layer, whose weights are loaded, to nf4 with double quantization, on the
    device of its other weights. In the place of each remains a parameter of its shape and dtype without memory, for
    peft to put an adapter on.
    """
    names, stacks = list_adaptable(module).stacks, {}
    device = next(weight.device for name, weight in module.named_parameters() if name not in names)
    for name in names:
        weight = module.get_parameter(name)
        stacks[name] = FrozenStack("nf4", nf4.quantize(weight, device), weight.shape, weight.dtype)
        prefix, _, own = name.rpartition(".")
        empty = make_placeholder(weight.shape, weight.dtype, device)
        setattr(module.get_submodule(prefix), own, nn.Parameter(empty, requires_grad=False))
    return stacks


def make_placeholder(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor of this shape that takes no memory: what peft reads of a parameter."""
    return torch.empty((), dtype=dtype, device=device).expand(shape)


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight that a run holds quantized. numel: its elements; nbytes: what they take. chunk_numel: the elements that
    are dequantized at once, which takes work_bytes for each besides the result; num_chunks: how often that is, for each
    of its products."""

    numel: int
    nbytes: int
    chunk_numel: int
    work_bytes: float
    num_chunks: int = 1


def mark_quantized(module: nn.Module, form: str) -> None:
    """Mark the experts of a layer on the meta device, where nothing can be quantized, as held in a form, for
    `list_quantized`; of nf4 its projections too."""
    projections = list_projections(module).values() if form == "nf4" else ()
    for part in (*projections, *list_stacks(module)):
        part.frozen_form = form  # type: ignore[assignment]


def list_quantized(module: nn.Module) -> list[QuantizedWeight]:
    """Returns the weights of a layer on the meta device that a run holds quantized."""
    found = []
    for part in module.modules():
        form: Any = getattr(part, "frozen_form", None)
        if form is None:
            continue
        work = FORMS[form].WORK_BYTES
        for weight in part.parameters(recurse=False):
            numel = weight.numel()
            if weight.ndim == 3:
                length, nbytes = count_chunk(weight.shape), count_stack_bytes(form, weight.shape)
                found.append(
                    QuantizedWeight(numel, nbytes, length * weight[0].numel(), work, -(-len(weight) // length))
                )
            elif weight.ndim == 2 and not is_stack(part):
                found.append(QuantizedWeight(numel, round(nf4.NF4_BYTES * numel), numel, work))
    return found
