"""Keys and values are repeated where no fused kernel takes grouped queries: SDPA's arguments and its results."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import LlamaConfig

from models.architecture.lookup import build_layers
from models.layers import grouped_queries
from models.layers.grouped_queries import takes_groups

B, T, H, G = 2, 12, 4, 2


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Heads of keys and `enable_gqa` of each call of SDPA."""
    found: list[tuple[int, bool]] = []
    own = F.scaled_dot_product_attention

    def record(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
        found.append((key.shape[1], options.get("enable_gqa", False)))
        assert value.shape[1] == key.shape[1]
        return own(query, key, value, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", record)
    return found


def compute(implementation: str) -> list[torch.Tensor]:
    """Output and gradients of a decoder layer whose rows are whole."""
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=H, num_key_value_heads=G,
        vocab_size=100,
    )  # fmt: skip
    config._attn_implementation = implementation
    layer = build_layers(config)[1]
    torch.manual_seed(0)
    module = layer.module_class(*layer.args)
    hidden_states = torch.randn(B, T, 32, requires_grad=True)
    output, *_ = module((hidden_states, torch.arange(T).expand(B, T).clone(), torch.ones(B, T, dtype=torch.int32)))
    return [output, *torch.autograd.grad(output.square().sum(), [hidden_states, *module.parameters()])]


@pytest.mark.parametrize("implementation", ["sdpa", "varlen"])
def test_a_kernel_without_groups_gets_repeated_keys(
    implementation: str, calls: list[tuple[int, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    grouped = compute(implementation)
    assert calls == [(G, True)]
    calls.clear()
    monkeypatch.setattr(grouped_queries, "takes_groups", lambda query: False)  # as in fp32 on a GPU
    repeated = compute(implementation)
    assert calls == [(H, False)]
    for found, expected in zip(repeated, grouped, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("is_cuda", "dtype", "capability", "takes"),
    [
        (False, torch.float32, None, True),
        (True, torch.float32, (9, 0), False),
        (True, torch.bfloat16, (9, 0), True),
        (True, torch.float16, (8, 0), True),
        (True, torch.float16, (7, 0), False),
    ],
)
def test_fused_kernels_take_groups_in_16_bits_from_sm80_on(
    is_cuda: bool, dtype: torch.dtype, capability: tuple[int, int] | None, takes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    query: Any = SimpleNamespace(is_cuda=is_cuda, dtype=dtype, device=torch.device("cuda" if is_cuda else "cpu"))
    assert takes_groups(query) == takes
