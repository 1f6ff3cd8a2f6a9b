"""Fused kernels as a plan counts them: what they keep, and what they move, by hand."""

from __future__ import annotations

import torch
from torch import nn
from transformers import LlamaConfig

from models.architecture.lookup import build_layers
from models.layers import liger_on_meta
from training.costs.cost import MicroBatchShape, count_layers
from training.costs.trace import trace_passes
from training.costs.traffic import Traffic, count_traffic

T, D, INTERMEDIATE, HEADS, KV_HEADS, E = 16, 64, 96, 4, 2, 16
CONFIG = LlamaConfig(
    hidden_size=D, intermediate_size=INTERMEDIATE, num_hidden_layers=1, num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS, vocab_size=32, attn_implementation="sdpa",
)  # fmt: skip


def test_a_layer_keeps_what_its_kernels_save() -> None:
    """A norm keeps its input and one fp32 number a row; the products after it keep its result."""
    shape = MicroBatchShape(1, T, torch.bfloat16)
    plain, fused = (count_layers(build_layers(CONFIG), CONFIG, shape, fuses=each)[1] for each in (False, True))
    norms = 2 * (2 * 2 * D + 4)
    rotary = 2 * 2 * E
    attention = 2 * (2 * D + 2 * KV_HEADS * E) + 4 * HEADS  # queries and outputs, keys and values, and a number a row
    mlp = 3 * 2 * INTERMEDIATE  # gate, up and their product
    assert fused.bytes.saved == T * (norms + rotary + attention + mlp)
    # Eager norms keep two results in fp32 and 16 bits in place of what goes in; SwiGLU what its activation makes
    more = 2 * (4 + 2 - 2) * D + 2 * INTERMEDIATE
    assert plain.bytes.saved - fused.bytes.saved == T * more
    assert fused.bytes.kept == plain.bytes.kept  # the results of products, under `selective`
    for name in ("forward_traffic", "backward_traffic", "remade_traffic"):
        few, many = getattr(fused.work, name), getattr(plain.work, name)
        assert few.moved < many.moved and few.kernels < many.kernels and few.products == many.products


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(D, dtype=torch.bfloat16, device="meta"))


def make(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16, device="meta", requires_grad=True)


def test_a_norm_is_a_kernel_each_way() -> None:
    module, x = Weighted(), make(T, D)
    trace = trace_passes(lambda: (liger_on_meta.normalize(x, module.weight, 1e-6),), module)
    assert trace.backward is not None
    forward, backward = count_traffic((trace.forward, trace.backward), fuses=False)
    assert forward == Traffic(2 * 2 * T * D + 2 * D + 4 * T, 1)
    sums = 4 * D + 2 * (4 * D) + 6 * D  # written, added up, and cast
    assert backward == Traffic(3 * 2 * T * D + 2 * D + 4 * T + sums, 3)


def test_a_gate_is_copied_before_its_gradient_takes_its_place() -> None:
    gate, up = make(T, D), make(T, D)
    trace = trace_passes(lambda: (liger_on_meta.multiply_gated(gate, up),), nn.Module())
    assert trace.backward is not None
    found = count_traffic((trace.forward, trace.backward), fuses=False)
    assert found == [Traffic(3 * 2 * T * D, 1), Traffic((2 * 2 + 5) * 2 * T * D, 3)]


def test_queries_and_keys_are_copied_and_rotated_by_one_kernel() -> None:
    query, key = make(1, HEADS, T, E), make(1, KV_HEADS, T, E)
    cos, sin = (torch.empty(1, T, E, dtype=torch.bfloat16, device="meta") for _ in range(2))
    trace = trace_passes(lambda: (torch.cat(liger_on_meta.rotate(query, key, cos, sin), dim=1),), nn.Module())
    (forward,) = count_traffic([trace.forward], fuses=False)
    both = 2 * (HEADS + KV_HEADS) * T * E
    assert forward == Traffic(2 * both + (2 * both + 2 * 2 * T * E) + 2 * both, 4)  # the last one joins them
