"""LoRA (2106.09685) on the stacked experts of a layer, computed by grouped matrix products: each row is multiplied by
the matrix A of its expert, then by the matrix B of its expert.

peft's own module computes W + B A for the whole stack of experts in each forward pass, so its backward pass needs a
gradient as large as the stack. Here neither of the two is computed.

Names, shapes and scaling are those of peft's `target_parameters` (`ParamWrapper`, tuners/lora/layer.py, 0.21.2):

    A   [r x E, in]     row e x r + i belongs to expert e and is row i of its matrix [r, in]
    B   [out, r x E]    column i x E + e belongs to expert e and is column i of its matrix [out, r]

E experts, r the rank of an adapter, in and out: the inputs and outputs of one expert's matrix.
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

_ROW_BYTES = 16  # torch's grouped product needs rows of a multiple of so many bytes (torch 2.13)


class GroupedLora(ParamWrapper):
    """peft's wrapper that adapts one parameter of a module of stacked experts, such as `gate_up_proj`. The experts
    themselves add the low-rank product to their grouped product (`project` in `models/experts/grouped.py`). To adapt
    several parameters of one module, wrappers are nested, as in peft.

    No instance is constructed: `use_grouped_products` turns peft's wrappers into instances of this class.
    """

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the outputs of the experts with the low-rank product added. If the experts are configured to use
        another implementation than grouped products, peft's own forward pass computes them.

        x: hidden states. args, kwargs: whatever else the experts' forward pass takes.
        """
        experts: Any = self.get_base_layer()
        if experts.config._experts_implementation != GROUPED:
            return super().forward(x, *args, **kwargs)
        return experts(x, *args, **kwargs)

    def list_factors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the two factors for the grouped product, [E, r, in] and [E, r, out]: A, and B multiplied by the
        scaling. Zeros are added to r until a row of r numbers is a multiple of 16 bytes (`_ROW_BYTES`), which does not
        change the product. If peft takes the stack's outputs for its inputs (`is_transposed_to_peft`), its A and B are
        exchanged here, so that `in` and `out` are always those of the experts.

        Raises ValueError unless exactly one adapter is active.
        """
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
        """Turn the adapters of this wrapper on or off, as peft does, and the low-rank product with them."""
        super().enable_adapters(enabled)
        self.set_low_rank(enabled)

    def set_low_rank(self, enabled: bool = True) -> None:
        """Register this wrapper's factors with the experts, which then add the low-rank product to their own, or remove
        them if `enabled` is false."""
        experts: Any = self.get_base_layer()
        others = {name: factors for name, factors in _get_low_rank(experts).items() if name != self.parameter_name}
        experts.low_rank = others | ({self.parameter_name: self.list_factors} if enabled else {})

    @torch.no_grad()
    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Add the scaled B A to the weight in place, one expert at a time. peft computes B A for all experts at once,
        which takes the memory of another stack. The sum is computed in the dtype of A and B (fp32 or wider when
        `models/weights/adapted.py` merges) and rounded to the dtype of the weight.

        safe_merge: ignored; the result is not checked for NaN. adapter_names: the adapters to merge; None for the
        active ones.
        """
        weight, transposed = self.get_param().data, is_transposed_to_peft(self.get_base_layer())
        for name in check_adapters_to_merge(self, adapter_names):
            for expert, (first, second) in enumerate(zip(*self._factors(name), strict=True)):
                change = (second @ first) * self.scaling[name]  # [out, in]
                weight[expert] = weight[expert].to(change.dtype) + (change.T if transposed else change)
            self.merged_adapters.append(name)

    def _factors(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return A as [E, r, in] and B as [E, out, r], without the scaling. They are views of the parameters of the
        adapter `name`."""
        first, second = self.lora_A[name].get_parameter("weight"), self.lora_B[name].get_parameter("weight")
        return (
            first.view(self.num_experts, -1, first.shape[-1]),
            second.view(second.shape[0], -1, self.num_experts).permute(2, 0, 1),
        )


@contextmanager
def peft_orientation(module: nn.Module) -> Iterator[None]:
    """Within the context, `is_transposed` of every module of stacked experts in `module` is what peft assumes for
    transformers' own models (`is_transposed_to_peft`). So adapters that peft creates here have the shapes of those in a
    peft folder. The values from before are restored at the end."""
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
    """Turn each of peft's wrappers around stacked experts in `module` into a `GroupedLora`, in place. Parameters and
    their names stay the same."""
    for wrapper in module.modules():
        if type(wrapper) is ParamWrapper and is_stack(wrapper.get_base_layer()):
            wrapper.__class__ = GroupedLora
            cast(GroupedLora, wrapper).set_low_rank()


def _get_low_rank(experts: nn.Module) -> dict[str, Any]:
    """Return the registered low-rank factors of a module of stacked experts: name of the parameter -> function that
    returns its factors (`GroupedLora.list_factors`). `project` in `models/experts/grouped.py` calls these functions."""
    low_rank: dict[str, Any] = getattr(experts, "low_rank", {})  # type: ignore[arg-type]
    return low_rank
