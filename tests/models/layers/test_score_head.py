"""Reward models of every family against `transformers`' own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.families import FAMILIES, build_family, build_family_config
from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, LlamaConfig

from errors import UserError
from models.architecture.lookup import build_layers
from models.layers.score_head import describe_reward_model

LENGTHS = (17, 9)  # of the rows, padded to the longest
GENERIC = ("gpt_neox", "qwen3_moe")  # without a file


def score(model: torch.nn.Module, input_ids: torch.Tensor) -> torch.Tensor:
    """Return the scores of the project's layers, with the weights of `model`."""
    weights = model.state_dict()
    position_ids = torch.arange(LENGTHS[0]).repeat(2, 1)
    segment_ids = (position_ids < torch.tensor(LENGTHS)[:, None]).int()
    values: Any = (input_ids, position_ids, segment_ids)
    names = set()
    for layer in build_layers(model.config):
        assert layer.tied_key is None  # a tied embedding is not used again
        module = layer.module_class(*layer.args).eval()
        own = {name: layer.hf_prefix + name for name in module.state_dict()}
        module.load_state_dict({name: weights[hf_name] for name, hf_name in own.items()})
        names |= set(own.values())
        values = module(values)
    assert names == weights.keys()
    return values[0]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", [family for family in (*FAMILIES, *GENERIC) if family != "llama4_text"])
def test_scores_are_those_of_transformers(family: str, tied: bool) -> None:
    config = describe_reward_model(build_family_config(family, tied))
    config.pad_token_id = 0
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)](config).eval()
    input_ids = torch.randint(3, config.vocab_size, (2, LENGTHS[0]))
    input_ids[1, LENGTHS[1] :] = 0
    found = score(model, input_ids)
    with torch.no_grad():
        expected = model(input_ids, attention_mask=(input_ids != 0).int(), use_cache=False).logits.squeeze(1)
    assert expected.abs().min() > 1e-3
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())


def test_a_family_without_reward_models_is_refused() -> None:
    with pytest.raises(UserError, match="a 'llama4_text' cannot be a reward model: transformers has no class"):
        describe_reward_model(build_family("llama4_text").config)


def test_a_classifier_of_several_labels_is_refused() -> None:
    config = LlamaConfig(num_hidden_layers=1, architectures=["LlamaForSequenceClassification"], num_labels=3)
    with pytest.raises(
        UserError, match="LlamaForSequenceClassification with num_labels=3; a reward model has one label"
    ):
        build_layers(config)
