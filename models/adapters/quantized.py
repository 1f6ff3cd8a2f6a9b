"""Frozen weights that stay quantized under an adapter: the projections and experts of a layer in nf4 with double
quantization (QLoRA, 2305.14314), or as they are published (`models/weights/published.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from models.adapters.targets import list_adaptable
from models.experts.frozen import count_chunk
from models.experts.grouped import is_stack
from models.layers import nf4
from models.layers.frozen import FORMS, FrozenLinear, FrozenStack, count_stack_bytes


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


def list_held(module: nn.Module, form: str) -> tuple[str, ...]:
    """Return the weights of a layer's module, without an adapter yet, that may be held in a form, by name."""
    parts = list_adaptable(module)
    projections = parts.projections if FORMS[form].HAS_PROJECTIONS else ()
    return (*(f"{name}.weight" for name in projections), *parts.stacks)


def hold(module: nn.Module, held: Mapping[str, FrozenStack]) -> list[Replacement]:
    """Put quantized projections into a layer's module, and return the places of stacks: parameters that peft reads when
    it puts an adapter on them. held: by name, before an adapter changes names."""
    places = []
    for name, stack in held.items():
        prefix, _, own = name.rpartition(".")
        owner = module.get_submodule(prefix)
        if isinstance(owner, nn.Linear):
            module.set_submodule(prefix, FrozenLinear(stack, owner.bias))
        else:
            places.append(Replacement(owner, own, stack))
    return places


@torch.no_grad()
def quantize(module: nn.Module, names: Iterable[str]) -> dict[str, FrozenStack]:
    """Quantize weights of a layer to nf4 with double quantization, one matrix at a time, on the device of its other
    weights. In the place of each remains a parameter of its shape and dtype without memory."""
    names = list(names)
    device = next((weight.device for name, weight in module.named_parameters() if name not in names), None)
    held = {}
    for name in names:
        weight = module.get_parameter(name)
        matrices = weight if weight.ndim == 3 else weight.unsqueeze(0)
        place = device or weight.device
        held[name] = FrozenStack("nf4", nf4.quantize(matrices, place), matrices.shape, weight.dtype)
        prefix, _, own = name.rpartition(".")
        empty = make_placeholder(weight.shape, weight.dtype, place)
        setattr(module.get_submodule(prefix), own, nn.Parameter(empty, requires_grad=False))
    return held


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


def mark_quantized(module: nn.Module, names: Iterable[str], form: str) -> None:
    """Mark weights of a layer on the meta device, where nothing can be quantized, as held in a form, for
    `list_quantized`."""
    for name in names:
        module.get_submodule(name.rpartition(".")[0]).frozen_form = form  # type: ignore[assignment]


def list_quantized(module: nn.Module) -> list[QuantizedWeight]:
    """Returns the weights of a layer on the meta device that a run holds quantized."""
    found = []
    for part in module.modules():
        form: Any = getattr(part, "frozen_form", None)
        if form is None:
            continue
        for weight in part.parameters(recurse=False):
            if weight.ndim != 3 if is_stack(part) else weight.ndim != 2:
                continue
            shape = weight.shape if weight.ndim == 3 else (1, *weight.shape)
            length = count_chunk(shape)
            found.append(
                QuantizedWeight(
                    weight.numel(),
                    count_stack_bytes(form, shape),
                    length * shape[1] * shape[2],
                    FORMS[form].WORK_BYTES,
                    -(-shape[0] // length),
                )
            )
    return found
