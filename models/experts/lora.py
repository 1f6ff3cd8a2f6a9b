"""LoRA (2106.09685) on the stacked experts of a layer, as grouped products: rows times A, then B, of their expert.

peft's own module computes the whole stack, W + B A, in each forward pass, so its backward pass needs a gradient as
large as the stack; here neither exists. Names, shapes and scaling are those of peft's `target_parameters`
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

_ROW_BYTES = 16  # torch's grouped product needs rows whose size is a multiple of this (2.13)


class GroupedLora(ParamWrapper):
    """peft's wrapper around stacked experts for one of their parameters, with the low-rank product computed among the
    experts' own grouped products. Several wrappers on one module are nested, as in peft.
    """

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run the experts, which add the low-rank product; peft's forward pass where they use no grouped products."""
        experts: Any = self.get_base_layer()
        if experts.config._experts_implementation != GROUPED:
            return super().forward(x, *args, **kwargs)
        return experts(x, *args, **kwargs)

    def list_factors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns A [E, r, in] and the scaled B [E, r, out], with r padded by zeros to a rank that torch's grouped
        product accepts."""
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
        self.set_low_rank(enabled)

    def set_low_rank(self, enabled: bool = True) -> None:
        """Let the experts add the low-rank product, or not."""
        experts: Any = self.get_base_layer()
        others = {name: factors for name, factors in _get_low_rank(experts).items() if name != self.parameter_name}
        experts.low_rank = others | ({self.parameter_name: self.list_factors} if enabled else {})

    @torch.no_grad()
    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Add B A to the weight, expert by expert, in fp32 or wider: peft computes it for all experts at once."""
        weight, transposed = self.get_param().data, is_transposed_to_peft(self.get_base_layer())
        for name in check_adapters_to_merge(self, adapter_names):
            for expert, (first, second) in enumerate(zip(*self._factors(name), strict=True)):
                change = (second @ first) * self.scaling[name]  # [out, in]
                weight[expert] = weight[expert].to(change.dtype) + (change.T if transposed else change)
            self.merged_adapters.append(name)

    def _factors(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns A [E, r, in] and B [E, out, r], views."""
        first, second = self.lora_A[name].get_parameter("weight"), self.lora_B[name].get_parameter("weight")
        return (
            first.view(self.num_experts, -1, first.shape[-1]),
            second.view(second.shape[0], -1, self.num_experts).permute(2, 0, 1),
        )


@contextmanager
def peft_orientation(module: nn.Module) -> Iterator[None]:
    """Within the context, stacked experts report `is_transposed` as peft knows it from transformers' own models, so
    that the adapters it makes have the shapes that it loads."""
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
    """Make peft's wrappers around stacked experts compute by grouped products."""
    for wrapper in module.modules():
        if type(wrapper) is ParamWrapper and is_stack(wrapper.get_base_layer()):
            wrapper.__class__ = GroupedLora
            cast(GroupedLora, wrapper).set_low_rank()


def _get_low_rank(experts: nn.Module) -> dict[str, Any]:
    """Returns parameter name -> function that returns its factors, as `models.experts.grouped.project` reads it."""
    low_rank: dict[str, Any] = getattr(experts, "low_rank", {})  # type: ignore[arg-type]
    return low_rank
