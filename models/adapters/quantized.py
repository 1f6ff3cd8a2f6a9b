"""QLoRA (2305.14314): the frozen projections and experts of a layer in nf4 with double quantization, through
bitsandbytes. Projections are its own modules; stacks of experts are dequantized a chunk at a time
(`models/experts/frozen.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from models.adapters.targets import list_adaptable, list_projections
from models.experts.frozen import FrozenStack, count_chunk, count_stack_bytes
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


@torch.no_grad()
def quantize_stacks(module: nn.Module) -> list[Replacement]:
    """Quantize the stacks of experts of a layer, whose weights are loaded, to nf4 with double quantization, on the
    device of its other weights. Until each is replaced, a parameter of its shape and dtype without memory is in its
    place, for peft to put an adapter on.
    """
    names, replacements = list_adaptable(module).stacks, []
    device = next(weight.device for name, weight in module.named_parameters() if name not in names)
    for name in names:
        prefix, _, own = name.rpartition(".")
        experts, weight = module.get_submodule(prefix), module.get_parameter(name)
        stack = FrozenStack("nf4", nf4.quantize(weight, device), weight.shape, weight.dtype)
        replacements.append(Replacement(experts, own, stack))
        empty = torch.empty((), dtype=weight.dtype, device=device).expand(weight.shape)
        setattr(experts, own, nn.Parameter(empty, requires_grad=False))
    return replacements


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight that a run holds in 4 bits. numel: its elements; nbytes: what they take. chunk_numel: the elements that
    are dequantized at once; num_chunks: how often that is, for each of its products."""

    numel: int
    nbytes: int
    chunk_numel: int
    num_chunks: int = 1


def mark_quantized(module: nn.Module) -> None:
    """Mark the projections and experts of a layer on the meta device, where nothing can be quantized, as held in 4
    bits, for `list_quantized`."""
    for part in (*list_projections(module).values(), *list_stacks(module)):
        part.is_in_4bit = True  # type: ignore[assignment]


def list_quantized(module: nn.Module) -> list[QuantizedWeight]:
    """Returns the weights of a layer on the meta device that a run holds in 4 bits."""
    found = []
    for part in module.modules():
        if not getattr(part, "is_in_4bit", False):
            continue
        for weight in part.parameters(recurse=False):
            if weight.ndim == 3:
                length = count_chunk(weight.shape)
                nbytes = count_stack_bytes("nf4", weight.shape)
                chunks = -(-len(weight) // length)
                found.append(QuantizedWeight(weight.numel(), nbytes, length * weight[0].numel(), chunks))
            elif weight.ndim == 2 and not is_stack(part):
                found.append(QuantizedWeight(weight.numel(), round(nf4.NF4_BYTES * weight.numel()), weight.numel()))
    return found
