"""Layers that carry a state along the row: each document of a packed row as if it were alone."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.families import HYBRIDS, build_family, build_family_config
from torch import nn

import models.generic.family
import models.layers.decoder
from errors import UserError
from models.adapters.targets import build_lora_config, list_projections
from models.architecture.lookup import build_layers, check_packing
from models.layers.documents import DocumentBounds, number_documents
from models.layers.recurrent import batch_documents, find_mixers, isolate_documents
from models.weights.random_weights import RandomWeights

BOUND = 1e-5
LENGTHS = ((3, 9, 12), (7, 1, 16))  # of the documents of each row
B, T = len(LENGTHS), sum(LENGTHS[0])
SHORT = ("qwen3_next", "bamba", "minimax", "lfm2")  # a gated delta layer, a state space, lightning, a convolution
EVERY_HYBRID = pytest.mark.parametrize(
    "model_type", [name if name in SHORT else pytest.param(name, marks=pytest.mark.full) for name in HYBRIDS]
)


def packed_positions() -> torch.Tensor:
    return torch.stack([torch.cat([torch.arange(length) for length in row]) for row in LENGTHS])


def list_documents() -> list[tuple[int, slice]]:
    """Return (row, tokens) of each document."""
    starts = [[sum(row[:i]) for i in range(len(row))] for row in LENGTHS]
    return [
        (index, slice(start, start + length))
        for index, row in enumerate(LENGTHS)
        for start, length in zip(starts[index], row, strict=True)
    ]


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).abs().max() / b.abs().max()).item()


def list_mixers(model: Any) -> list[tuple[str, nn.Module, nn.Module]]:
    """Return (layer's type, layer, mixer) of the model of `transformers`."""
    layers = getattr(model.base_model, "layers", None) or model.base_model.blocks
    types = getattr(model.config, "layer_types", None) or ["full_attention"] * len(layers)
    return [
        (kind, layer, mixer) for kind, layer in zip(types, layers, strict=True) for mixer in find_mixers(layer, kind)
    ]


def run(mixer: nn.Module, hidden_states: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
    """Return a mixer's first output, called as a decoder layer of `transformers` calls it."""
    given = {
        **dict.fromkeys(("position_embeddings", "attention_mask", "conv_mask", "past_key_values", "cache")),
        "use_cache": False,
    }
    given["position_ids"] = position_ids
    names = inspect.signature(type(mixer).forward).parameters
    output = mixer(hidden_states, **{name: value for name, value in given.items() if name in names})
    return output if isinstance(output, torch.Tensor) else output[0]


def run_backward(mixer: nn.Module, outputs: torch.Tensor) -> list[torch.Tensor]:
    """Return the gradients of the mixer's parameters, for a loss that depends on each number of the outputs [tokens,
    ...]."""
    weights = torch.linspace(-1, 1, outputs[0].numel(), dtype=outputs.dtype).view_as(outputs[0])
    mixer.zero_grad()
    (outputs * weights).sum().backward()
    return [parameter.grad.clone() for parameter in mixer.parameters() if parameter.grad is not None]


@EVERY_HYBRID
def test_a_mixer_sees_each_document_of_a_packed_row_alone(model_type: str) -> None:
    """Runs in fp64: in fp32 two orders of the same sums differ by up to 2e-5 in some gradients of
    gated delta layers."""
    model = build_family(model_type).double()
    position_ids, context = packed_positions(), SimpleNamespace(batches=None, request_batches=lambda: None)
    mixers = list_mixers(model)
    assert mixers
    for layer, layer_type in {layer: layer_type for layer_type, layer, _ in mixers}.items():
        isolate_documents(layer, context, layer_type)
    batches = batch_documents(number_documents(position_ids, None), None)
    generator = torch.Generator().manual_seed(1)
    for mixer in {type(mixer): mixer for _, _, mixer in mixers}.values():
        has_projections = any(isinstance(part, nn.Linear) for part in mixer.modules())
        width = model.config.hidden_size if has_projections else mixer.conv1d.in_channels
        hidden_states = torch.randn(B, T, width, dtype=torch.float64, generator=generator, requires_grad=True)
        context.batches = None
        leaking = run(mixer, hidden_states, position_ids).flatten(0, 1)
        alone = torch.cat(
            [
                run(mixer, hidden_states[row, None, span], position_ids[row, None, span])[0]
                for row, span in list_documents()
            ]
        )
        expected = [*run_backward(mixer, alone), hidden_states.grad]
        context.batches, hidden_states.grad = batches, None
        together = run(mixer, hidden_states, position_ids).flatten(0, 1)
        assert difference(leaking, alone) > 1e-3  # the test can tell
        assert difference(together, alone) < BOUND
        gradients = [*run_backward(mixer, together), hidden_states.grad]
        assert all(difference(ours, theirs) < BOUND for ours, theirs in zip(gradients, expected, strict=True))


@pytest.mark.parametrize("bounds", [None, DocumentBounds(6, 16), DocumentBounds(11, 24)])
def test_each_token_has_one_place_in_the_batches_of_its_document(bounds: DocumentBounds | None) -> None:
    numbers = number_documents(packed_positions(), None)
    batches, places = batch_documents(numbers, bounds)
    laid_out = torch.cat([batch.flatten() for batch in batches])
    assert torch.equal(laid_out[places], torch.arange(B * T))
    firsts = torch.cat([batch[:, 0] for batch in batches])
    starts = [T * row + span.start for row, span in list_documents()]
    assert set(starts) <= set(firsts.tolist())
    for batch in batches:
        inside = batch < B * T - 1
        assert torch.equal((batch.diff() == 1) | ~inside[:, 1:], torch.ones_like(batch.diff(), dtype=torch.bool))
    if bounds is None:  # a document is at least half as wide as its batch
        assert len(laid_out) <= 2 * B * T


def test_a_family_whose_packed_documents_see_each_other_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = build_family_config("qwen3_5_text")
    check_packing(config)
    monkeypatch.setattr(models.generic.family, "_packs", {})
    monkeypatch.setattr(models.layers.decoder, "isolate_documents", lambda layer, context, layer_type: None)
    with pytest.raises(
        UserError, match=r"data\.packing=true: .* see each other in a 'qwen3_5_text': '.*' of a small model differs by"
    ):
        check_packing(config)


@pytest.mark.full  # peft takes seconds to import
def test_adapters_leave_out_what_a_mixer_reads_itself() -> None:
    config = build_family_config("mamba")
    config._attn_implementation = "eager"
    layers = build_layers(config)
    assert list(list_projections(layers[1].build_on_meta())) == ["mixer.in_proj"]
    with pytest.raises(UserError, match="an adapter on 'out_proj' would have no effect"):
        build_lora_config(layers, ["in_proj", "out_proj"])


@pytest.mark.full
@pytest.mark.parametrize("model_type", [name for name in HYBRIDS if name not in ("zamba", "zamba2", "zaya", "xlstm")])
def test_random_weights_are_drawn_for_every_part(model_type: str) -> None:
    config = build_family_config(model_type)
    if model_type in ("mamba", "mamba2", "falcon_mamba", "rwkv"):
        config._attn_implementation = "eager"
    layers, source = build_layers(config), RandomWeights(config, 0)
    for index, layer in enumerate(layers):
        drawn, again = source.read_layer(index, layer), source.read_layer(index, layer)
        assert all(tensor.isfinite().all() and torch.equal(tensor, again[name]) for name, tensor in drawn.items())
