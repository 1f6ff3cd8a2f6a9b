"""LoRA that starts as a part of the base weights: PiSSA (2404.02948) and OLoRA (2406.01775), as peft computes them.

peft takes the product that the adapter starts as, s B0 A0, out of the base weight. Here the base weight stays as it is,
for checkpoints and exports are of an adapter for the model as it was, and the layer subtracts the product itself:
W x + s (B A - B0 A0) x, with the outputs and gradients of peft's. A file has both as one plain adapter of twice the
rank, [B -B0] and [A; A0], which anything reads (peft converts such adapters alike, by
`path_initial_model_for_weight_conversion`).

r the rank.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from errors import UserError
from models.adapters.folder import ADAPTER_NAME
from models.adapters.options import starts_from_base

if TYPE_CHECKING:
    from peft import LoraConfig  # imported on use: peft takes seconds


def describe_saved(lora: LoraConfig) -> LoraConfig:
    """Returns the config of the adapter in a run's files, which for these has twice the rank and the same scale."""
    saved = copy.deepcopy(lora)
    if starts_from_base(lora.init_lora_weights):
        saved.r, saved.init_lora_weights = 2 * lora.r, True
        scale = math.sqrt(2) if lora.use_rslora else 2
        saved.lora_alpha = scale * lora.lora_alpha  # type: ignore[assignment]  # peft takes any number
    return saved


@torch.no_grad()
def start_from_base(module: nn.Module, init: str) -> None:
    """Set the adapters of a layer's module, whose base weights are loaded, and keep what they start as. Raises
    UserError for a rank that a weight does not have."""
    for name, adapted in _list_adapted(module):
        first, second = _get_pair(adapted)
        base, expected = adapted.get_base_layer(), (first.shape, second.shape)
        dtype, weight = first.dtype, base.weight.data.clone()  # peft may change it in place
        adapted.olora_init(ADAPTER_NAME) if init == "olora" else adapted.pissa_init(ADAPTER_NAME, init)
        base.weight.data = weight
        first, second = _get_pair(adapted)
        if (first.shape, second.shape) != expected:
            raise UserError(
                f"adapter.r={expected[0][0]}: with adapter.init_lora_weights={init} at most the rank of each base "
                f"weight, and '{name}' is of shape {list(weight.shape)}; lower adapter.r"
            )
        first.data, second.data = first.data.to(dtype).contiguous(), second.data.to(dtype).contiguous()
        _keep_start(adapted, first.clone(), second.clone())


def restore_starts(module: nn.Module, tensors: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
    """Take what the adapters of a layer's module have started as from the tensors of a run's file, and return the other
    halves: the adapters themselves."""
    halves = dict(tensors)
    for name, adapted in _list_adapted(module):
        first, second = f"{name}.lora_A.{ADAPTER_NAME}.weight", f"{name}.lora_B.{ADAPTER_NAME}.weight"
        a, b = tensors.get(first), tensors.get(second)
        if a is None or b is None or a.shape[0] % 2 or b.shape[1] % 2:
            continue  # `fill_adapter` names it
        like = _get_pair(adapted)[0]
        (halves[first], start_a), (halves[second], minus_b) = a.chunk(2), b.chunk(2, dim=1)
        _keep_start(adapted, start_a.to(like, copy=True), -minus_b.to(like))
    return halves


def join_starts(module: nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the tensors that a run's file has of a layer's module: with these adapters [A; A0] and [B -B0], copies.

    tensors: by name, as the module has them.
    """
    joined = dict(tensors)
    for name, adapted in _list_adapted(module):
        if (start := get_start(adapted)) is not None:
            first, second = f"{name}.lora_A.{ADAPTER_NAME}.weight", f"{name}.lora_B.{ADAPTER_NAME}.weight"
            joined[first] = torch.cat([tensors[first], start[0]])
            joined[second] = torch.cat([tensors[second], -start[1]], dim=1)
    return joined


def get_start(adapted: nn.Module) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Returns A0 [r, inputs] and B0 [outputs, r] of a projection with an adapter; None for one that starts at zero."""
    first, second = getattr(adapted, "start_A", None), getattr(adapted, "start_B", None)
    return None if first is None or second is None else (first, second)


def _keep_start(adapted: Any, first: torch.Tensor, second: torch.Tensor) -> None:
    adapted.register_buffer("start_A", first, persistent=False)
    adapted.register_buffer("start_B", second, persistent=False)


def _get_pair(adapted: Any) -> tuple[nn.Parameter, nn.Parameter]:
    return adapted.lora_A[ADAPTER_NAME].weight, adapted.lora_B[ADAPTER_NAME].weight


def _list_adapted(module: nn.Module) -> Iterator[tuple[str, Any]]:
    from peft.tuners.lora import LoraLayer

    for name, child in module.named_modules():
        if isinstance(child, LoraLayer) and ADAPTER_NAME in child.lora_A:
            yield name, child
