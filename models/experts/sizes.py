"""The share of a layer that a token uses: the chosen ones of a mixture's experts, and all other parameters."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from transformers import PretrainedConfig

# Names in transformers' configs (5.23); most have several of these names for one number
NUM_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
NUM_CHOSEN = ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts", "moe_top_k")


def count_experts(config: PretrainedConfig) -> tuple[int, int]:
    """Return (experts that a token chooses, experts to choose from); (1, 1) for a dense model."""
    holder = getattr(config, "ffn_config", config)  # DBRX has a config inside its config for them
    chosen, available = (_read_first(holder, names) for names in (NUM_CHOSEN, NUM_EXPERTS))
    return (chosen, available) if chosen and available else (1, 1)


def _read_first(config: PretrainedConfig, names: tuple[str, ...]) -> int | None:
    found = next((value for name in names if (value := getattr(config, name, None))), None)
    return max(found) if isinstance(found, list) else found  # Hunyuan has a number for each layer


def active_share(name: str, config: PretrainedConfig) -> float:
    """Return the share of a parameter that a token uses: k of n for routed experts, 1 for all others.

    name: of the parameter in its layer's module.
    """
    if "experts." not in name or "shared_expert" in name:
        return 1.0
    chosen, available = count_experts(config)
    return chosen / available


def list_matrices(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Yield (part, name, parameter) of the matrices in a layer's module: without the biases of stacked experts, which
    have two dimensions too."""
    for prefix, part in module.named_modules():
        for name, parameter in part.named_parameters(prefix, recurse=False):
            if parameter.ndim > 1 and not name.endswith("bias"):
                yield part, name, parameter
