"""Adapters of stacked experts, by their tensors in a peft folder: their shapes, their factors by expert, and the other
orientation, which peft wrote before 0.19.1.

peft (0.21.2) keeps an expert's outputs x inputs matrix as B A, with A [r x E, in] and B [out, r x E]
(`models/experts/lora.py`). Up to 0.18 it took every stack for [E, in, out], so that for the stacks [E, out, in] of most
families its A has the outputs and its B the inputs: A [r x E, out], B [in, r x E], the same product transposed. 0.19.0
turned the wrong ones around: in a folder of it the stacks [E, in, out] (gpt-oss) are exchanged as well. They all hold
the same numbers, so that nothing is rounded when they are brought into today's order.

E experts, r the rank of an adapter, in and out: the inputs and outputs of one expert's matrix.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from packaging.version import InvalidVersion, Version

from models.adapters.adapter import inject_adapter
from models.adapters.folder import ADAPTER_NAME, to_peft_name
from models.adapters.targets import list_targets
from models.experts.grouped import is_transposed_to_peft
from models.layers.layer import Layer

if TYPE_CHECKING:
    from peft import LoraConfig  # imported on use: peft takes seconds

FIRST_RIGHT_PEFT = Version("0.19.1")  # the first whose stacks have today's order


@dataclass(frozen=True)
class StackAdapter:
    """The adapter of one stack of experts. layer: the prefix of its layer ("model.layers.3."). experts: the module of
    the experts in the layer ("mlp.experts"). stack: the parameter ("gate_up_proj"). first, second: the names of A and B
    in a peft folder. is_transposed: whether peft takes the stack for [E, in, out]."""

    layer: str
    experts: str
    stack: str
    first: str
    second: str
    num_experts: int
    rank: int
    alpha: float
    inputs: int
    outputs: int
    is_transposed: bool

    @property
    def shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """The shapes of A and B."""
        total = self.rank * self.num_experts
        return (total, self.inputs), (self.outputs, total)


def list_stack_adapters(layers: Sequence[Layer], lora: LoraConfig) -> list[StackAdapter]:
    """Return the adapters of stacked experts that the config puts on these layers."""
    return [adapter for layer in layers for adapter in _list_in_layer(layer, lora)]


def _list_in_layer(layer: Layer, lora: LoraConfig) -> Iterator[StackAdapter]:
    from models.experts.lora import GroupedLora

    module = layer.build_on_meta()
    if not list_targets(module, layer, lora).stacks:
        return
    inject_adapter(lora, module, layer)
    for name, wrapper in module.named_modules():
        if not isinstance(wrapper, GroupedLora):
            continue
        found: Any = wrapper
        first, second = found.lora_A[ADAPTER_NAME].weight, found.lora_B[ADAPTER_NAME].weight
        yield StackAdapter(
            layer=layer.hf_prefix,
            experts=name.replace(".base_layer", ""),
            stack=found.parameter_name,
            first=to_peft_name(f"{name}.lora_A.{ADAPTER_NAME}.weight", layer),
            second=to_peft_name(f"{name}.lora_B.{ADAPTER_NAME}.weight", layer),
            num_experts=found.num_experts,
            rank=found.r[ADAPTER_NAME],
            alpha=found.lora_alpha[ADAPTER_NAME],
            inputs=first.shape[1],
            outputs=second.shape[0],
            is_transposed=is_transposed_to_peft(found.get_base_layer()),
        )


def split_experts(first: torch.Tensor, second: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of A [r x E, in] and B [out, r x E] by expert: [E, r, in] and [E, out, r]."""
    return (
        first.view(num_experts, -1, first.shape[1]),
        second.view(second.shape[0], -1, num_experts).permute(2, 0, 1),
    )


def join_experts(first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return A [r x E, in] and B [out, r x E], from [E, r, in] and [E, out, r]: copies, the inverse of
    `split_experts`."""
    return (
        first.reshape(-1, first.shape[2]).contiguous(),
        second.permute(1, 2, 0).reshape(second.shape[1], -1).contiguous(),
    )


def exchange(first: torch.Tensor, second: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return A and B of the transposed product: A [r x E, out] and B [in, r x E] become A [r x E, in] and
    B [out, r x E], and the other way round. The numbers are the same, in another order."""
    outer, inner = split_experts(first, second, num_experts)  # [E, r, out] and [E, in, r]
    return join_experts(inner.transpose(1, 2), outer.transpose(1, 2))


def restore_order(
    tensors: Mapping[str, torch.Tensor], layers: Sequence[Layer], lora: LoraConfig
) -> dict[str, torch.Tensor]:
    """Return the tensors of a peft folder with the stacks that an older peft has exchanged in today's order. Where an
    expert's matrix is square, so that shapes do not tell, the folder's peft_version decides. Tensors whose shapes fit
    neither order stay: whoever loads them names them.

    lora: the folder's config.
    """
    restored = dict(tensors)
    if not lora.target_parameters:
        return restored
    for adapter in list_stack_adapters(layers, lora):
        first, second = tensors.get(adapter.first), tensors.get(adapter.second)
        if first is None or second is None:
            continue
        if is_exchanged(first.shape, second.shape, adapter.shapes, lora.peft_version, adapter.is_transposed):
            restored[adapter.first], restored[adapter.second] = exchange(first, second, adapter.num_experts)
    return restored


def is_exchanged(
    first: Sequence[int],
    second: Sequence[int],
    shapes: tuple[tuple[int, int], tuple[int, int]],
    peft_version: str | None,
    is_transposed: bool,
) -> bool:
    """Return whether an older peft has written A and B, of the shapes `first` and `second`, as those of the transposed
    product. shapes: of A and B in today's order. is_transposed: whether peft takes the stack for [E, in, out]."""
    (total, inputs), (outputs, _) = shapes
    found = (tuple(first), tuple(second))
    if found != ((total, outputs), (inputs, total)):
        return False
    return inputs != outputs or has_exchanged(peft_version, is_transposed)


def has_exchanged(peft_version: str | None, is_transposed: bool) -> bool:
    """Return whether this peft wrote a stack in the other order.

    peft_version: as adapter_config.json has it; None before 0.18, which did not write it. is_transposed: whether peft
    takes the stack for [E, in, out].
    """
    if peft_version is None:
        return not is_transposed
    try:
        version = Version(peft_version.partition("@")[0])  # of a development version: 0.19.1.dev0@commit
    except InvalidVersion:
        return False
    if version >= FIRST_RIGHT_PEFT:
        return False
    return not is_transposed or version >= Version("0.19.0")
