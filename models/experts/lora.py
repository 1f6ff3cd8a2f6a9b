"""LoRA (2106.09685) on the stacked experts of a layer, as grouped products: rows times A, then B, of their expert.

peft's own module computes the whole stack, W + B A, in each forward pass, and then a gradient as large as the
stack; here neither exists. Names, shapes and scaling are those of peft's `target_parameters`
(`ParamWrapper`, tuners/lora/layer.py, 0.21.2): A is [r x E, in], expert after expert, B is [out, r x E], rank after
rank.

S rows, sorted by expert; E experts; r the rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import check_adapters_to_merge
from torch import nn

from models.experts.grouped import GROUPED, is_stack, is_transposed_to_peft

_ROW_BYTES = 16  # torch's grouped product needs rows of a multiple of these bytes (2.13)


class GroupedLora(ParamWrapper):
    """Replaces peft's wrapper of stacked experts for one of their parameters; the low-rank product is part of the
    experts' own. Several on one module are nested, as in peft."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run the experts; as peft does where they are not computed by grouped products."""
        experts: Any = self.get_base_layer()
        if experts.config._experts_implementation != GROUPED:
            return super().forward(x, *args, **kwargs)
        return experts(x, *args, **kwargs)

    def list_factors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return A [E, r, in] and the scaled B [E, r, out], with the rank padded to one that a GPU's grouped product
        takes: zeros in both change nothing."""
        (name,) = self.active_adapters
        experts: Any = self.get_base_layer()
        first, second = self._factors(name)
        second = second.transpose(1, 2) * self.scaling[name]
        if experts.is_transposed != is_transposed_to_peft(experts):
            first, second = second, first
        missing = -first.shape[1] % (_ROW_BYTES // self.get_param().dtype.itemsize)
        if missing:
            first, second = (nn.functional.pad(factor, (0, 0, 0, missing)) for factor in (first, second))
        return first, second

    def enable_adapters(self, enabled: bool) -> None:
        super().enable_adapters(enabled)
        self.register_factors(enabled)

    def register_factors(self, enabled: bool = True) -> None:
        """Make the experts add the low-rank product, or not."""
        experts: Any = self.get_base_layer()
        others = {name: product for name, product in _list_products(experts).items() if name != self.parameter_name}
        experts.low_rank = others | ({self.parameter_name: self.list_factors} if enabled else {})

    @torch.no_grad()
    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Add B A to the weight, expert by expert: peft makes it for all at once, in fp32."""
        weight, transposed = self.get_param().data, is_transposed_to_peft(self.get_base_layer())
        for name in check_adapters_to_merge(self, adapter_names):
            for expert, (first, second) in enumerate(zip(*self._factors(name), strict=True)):
                change = (second @ first) * self.scaling[name]  # [out, in]
                weight[expert] += (change.T if transposed else change).to(weight.dtype)
            self.merged_adapters.append(name)

    def _factors(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return A [E, r, in] and B [E, out, r] as views."""
        first, second = self.lora_A[name].get_parameter("weight"), self.lora_B[name].get_parameter("weight")
        return (
            first.view(self.num_experts, -1, first.shape[-1]),
            second.view(second.shape[0], -1, self.num_experts).permute(2, 0, 1),
        )


@contextmanager
def show_to_peft(module: nn.Module) -> Iterator[None]:
    """Make stacked experts look as those of transformers' model do while peft wraps them, so that adapters fit both."""
    stacks: list[Any] = [part for part in module.modules() if is_stack(part)]
    marks = [experts.is_transposed for experts in stacks]
    for experts in stacks:
        experts.is_transposed = is_transposed_to_peft(experts)
    try:
        yield
    finally:
        for experts, mark in zip(stacks, marks, strict=True):
            experts.is_transposed = mark


def use_grouped_products(module: nn.Module) -> None:
    """Make peft's wrappers of stacked experts compute by grouped products."""
    for wrapper in module.modules():
        if type(wrapper) is ParamWrapper and is_stack(wrapper.get_base_layer()):
            wrapper.__class__ = GroupedLora
            cast(GroupedLora, wrapper).register_factors()


def _list_products(experts: nn.Module) -> dict[str, Any]:
    """Return parameter name -> the factors of its low-rank product, which `models.experts.grouped.project` reads."""
    products: dict[str, Any] = getattr(experts, "low_rank", {})  # type: ignore[arg-type]
    return products
