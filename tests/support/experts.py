"""The stacked experts of a layer, alone: built, run, compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import DeepseekV3Config, GptOssConfig, MixtralConfig, Qwen3MoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Experts
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

N, K, E, D, I = 40, 2, 8, 32, 24
EXPERTS: dict[str, Any] = {
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeExperts),
    "deepseek_v3": (DeepseekV3Config, DeepseekV3Experts),
    "mixtral": (MixtralConfig, MixtralExperts),
    "gpt_oss": (GptOssConfig, GptOssExperts),
}
BOUNDS = {torch.float32: 1e-5, torch.float64: 1e-13}


def build_experts(model_type: str, dtype: torch.dtype = torch.float32, intermediate_size: int = I) -> nn.Module:
    """Build experts with weights large enough that gpt_oss clamps some activations."""
    config_class, experts_class = EXPERTS[model_type]
    sizes = dict.fromkeys(("intermediate_size", "moe_intermediate_size"), intermediate_size)
    counts = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), E)
    config = config_class(hidden_size=D, num_experts_per_tok=K, hidden_act="silu", **sizes, **counts)
    torch.manual_seed(0)
    experts = experts_class(config).to(dtype)
    for parameter in experts.parameters():
        nn.init.normal_(parameter)
    return experts


Compute = Callable[..., torch.Tensor]


def compute(
    experts: nn.Module,
    implementation: str,
    index: torch.Tensor,
    run: Compute | None = None,
    weights_dtype: torch.dtype | None = None,
) -> list[Any]:
    """Returns the outputs, and the gradients of hidden states, router weights and parameters. weights_dtype: of the
    router weights; without it, that of the experts."""
    experts.config._experts_implementation = implementation  # type: ignore[union-attr]
    dtype = next(experts.parameters()).dtype
    torch.manual_seed(2)
    hidden_states = _draw(torch.randn, (len(index), D), dtype).requires_grad_()
    weights = _draw(torch.rand, index.shape, weights_dtype or dtype).requires_grad_()
    outputs = (experts if run is None else run)(hidden_states, index, weights)
    gradient = _draw(torch.randn, (len(index), D), dtype)
    return [outputs, *torch.autograd.grad(outputs, (hidden_states, weights, *experts.parameters()), gradient)]


def _draw(draw: Callable[..., torch.Tensor], shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return the same numbers in every dtype: torch draws others in each."""
    return draw(shape, dtype=torch.bfloat16).to(dtype)


def difference(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """Returns the largest relative difference of a tensor; NaN where any value is NaN."""
    return torch.stack([(a - b).abs().max() / b.abs().max() for a, b in zip(ours, theirs, strict=True)]).max().item()
