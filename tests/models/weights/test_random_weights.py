"""Weights from scratch: drawn as `transformers` draws them, and the same at every layout."""

from __future__ import annotations

import pytest
import torch
from support.families import FAMILIES, build_family_config
from transformers import AutoModelForCausalLM

from models.architecture.lookup import build_layers
from models.weights.random_weights import RandomWeights


def draw(family: str, seed: int = 1) -> dict[str, torch.Tensor]:
    config = build_family_config(family)
    source = RandomWeights(config, seed)
    tensors = {}
    for index, layer in enumerate(build_layers(config)):
        for name, tensor in source.read_layer(index, layer).items():
            tensors[layer.hf_prefix + name] = tensor
    return tensors


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_they_are_drawn_as_transformers_draws_them(family: str) -> None:
    torch.manual_seed(0)
    expected = AutoModelForCausalLM.from_config(build_family_config(family)).state_dict()
    drawn = draw(family)
    assert drawn.keys() <= expected.keys() <= drawn.keys() | {"lm_head.weight"}  # a tied head
    for name, tensor in drawn.items():
        theirs = expected[name]
        if theirs.std() == 0 or theirs.numel() == 1:
            assert torch.equal(tensor, theirs), name
        elif theirs.numel() < 48:  # one number for each head: too few to have a spread
            assert tensor.shape == theirs.shape and tensor.std() > 0, name
        else:
            assert tensor.std().item() == pytest.approx(theirs.std().item(), rel=0.25), name


def test_a_layer_has_numbers_of_its_own_by_the_seed() -> None:
    first, again, other = draw("llama"), draw("llama"), draw("llama", seed=2)
    assert all(torch.equal(tensor, again[name]) for name, tensor in first.items())
    name = "model.layers.{}.mlp.up_proj.weight"
    assert not torch.equal(first[name.format(0)], first[name.format(1)]) and not torch.equal(
        first[name.format(0)], other[name.format(0)]
    )
