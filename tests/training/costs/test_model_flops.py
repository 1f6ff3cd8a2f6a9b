"""The FLOPs of MFU are those of the passes that run, as torch counts them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from support.adapters import build_lora
from support.chain import B, Chain, T, positions, tokens
from support.families import build_family
from torch.utils.flop_counter import FlopCounterMode

from models.adapters.adapter import Adapter
from models.adapters.freeze import choose_trained
from models.architecture.lookup import build_layers
from models.layers.layer import Layer
from training.costs.cost import MicroBatchShape, count_layers
from training.planner.plan import compute_model_flops

LOWER = ("embed_tokens", r"layers\.[0-2]\.")  # all layers but the last
TOP = ["model.layers.3.self_attn.q_proj", "model.layers.3.mlp.down_proj"]


def build_on_top(layers: Sequence[Layer]) -> Adapter:
    return build_lora(layers, r=4, target_modules=TOP)


@pytest.mark.parametrize(
    ("freeze", "adapt"),
    [
        pytest.param((), None, id="nothing frozen"),
        pytest.param(("embed_tokens",), None, id="embedding frozen"),
        pytest.param(LOWER, None, id="lower layers frozen"),
        pytest.param((*LOWER, "lm_head"), None, id="head frozen too"),
        pytest.param((), build_lora, id="lora"),
        pytest.param((), build_on_top, id="lora on the last layer"),
    ],
)
def test_the_flops_of_a_token_are_those_of_its_passes(
    freeze: tuple[str, ...], adapt: Callable[[Sequence[Layer]], Adapter] | None
) -> None:
    """Beyond these PaLM's convention counts the embedding, whose rows are looked up, and the vectors of norms; and the
    gradients of the inputs of the first trained layer, which nothing below it asks for."""
    model = build_family("llama")
    model.config._attn_implementation = "eager"  # whose products torch counts as they are
    layers, chain = build_layers(model.config), Chain(model)
    adapter = None if adapt is None else adapt(layers)
    shape = MicroBatchShape(B, T, torch.float32)
    costs = count_layers(layers, model.config, shape, adapter=adapter, freeze=freeze)
    for index, (layer, module) in enumerate(zip(chain.layers, chain.stages, strict=True)):
        choose_trained(module, index, layer, adapter, freeze)
    with FlopCounterMode(display=False) as counter:
        chain(tokens(), positions()).sum().backward()
    run = counter.get_total_flops() / (B * T)
    first = next(cost for cost in costs if cost.parameters.active > cost.parameters.frozen)
    embedding = costs[0].parameters.active * (6 if costs[0] is first else 2)
    vectors = 6 * sum(p.numel() for p in chain.parameters() if p.ndim == 1)
    inputs = 0 if costs[0] is first else 2 * first.parameters.active
    counted = compute_model_flops(costs, T)
    assert run <= counted - embedding <= run + vectors + inputs
