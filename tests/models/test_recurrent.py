"""Layers that carry a state along the row: each document of a packed row as if it were alone."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.families import HYBRIDS, build_family
from torch import nn

from models.documents import number_documents
from models.recurrent import batch_documents, find_mixers, isolate_documents

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
    """(row, tokens) of each document."""
    starts = [[sum(row[:i]) for i in range(len(row))] for row in LENGTHS]
    return [
        (index, slice(start, start + length))
        for index, row in enumerate(LENGTHS)
        for start, length in zip(starts[index], row, strict=True)
    ]


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).abs().max() / b.abs().max()).item()


def list_mixers(model: Any) -> list[tuple[str, nn.Module, nn.Module]]:
    """(layer's type, layer, mixer) of the model of `transformers`."""
    layers = getattr(model.base_model, "layers", None) or model.base_model.blocks
    types = getattr(model.config, "layer_types", None) or ["full_attention"] * len(layers)
    return [
        (kind, layer, mixer) for kind, layer in zip(types, layers, strict=True) for mixer in find_mixers(layer, kind)
    ]


def run(mixer: nn.Module, hidden_states: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
    """What a mixer returns first, called as a decoder layer of `transformers` calls it."""
    given = {
        **dict.fromkeys(("position_embeddings", "attention_mask", "conv_mask", "past_key_values")),
        "use_cache": False,
    }
    given["position_ids"] = position_ids
    names = inspect.signature(type(mixer).forward).parameters
    output = mixer(hidden_states, **{name: value for name, value in given.items() if name in names})
    return output if isinstance(output, torch.Tensor) else output[0]


def run_backward(mixer: nn.Module, outputs: torch.Tensor) -> list[torch.Tensor]:
    """The gradients of the mixer's parameters, by a loss that sees each number of the outputs [tokens, ...]."""
    weights = torch.linspace(-1, 1, outputs[0].numel(), dtype=outputs.dtype).view_as(outputs[0])
    mixer.zero_grad()
    (outputs * weights).sum().backward()
    return [parameter.grad.clone() for parameter in mixer.parameters() if parameter.grad is not None]


@EVERY_HYBRID
def test_a_mixer_sees_each_document_of_a_packed_row_alone(model_type: str) -> None:
    """In fp64: in fp32 two orders of the same sums differ by up to 2e-5 in some gradients of gated delta layers."""
    model = build_family(model_type).double()
    position_ids, context = packed_positions(), SimpleNamespace(batches=None, request_batches=lambda: None)
    mixers = list_mixers(model)
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
            [run(mixer, hidden_states[row, None, of], position_ids[row, None, of])[0] for row, of in list_documents()]
        )
        expected = [*run_backward(mixer, alone), hidden_states.grad]
        context.batches, hidden_states.grad = batches, None
        together = run(mixer, hidden_states, position_ids).flatten(0, 1)
        assert difference(leaking, alone) > 1e-3  # the test can tell
        assert difference(together, alone) < BOUND
        gradients = [*run_backward(mixer, together), hidden_states.grad]
        assert all(difference(ours, theirs) < BOUND for ours, theirs in zip(gradients, expected, strict=True))
