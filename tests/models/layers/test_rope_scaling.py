"""`rope_parameters` of a run in a model's config, against the config that `transformers` reads from a file."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Gemma3TextConfig, GPT2Config, GraniteConfig, LlamaConfig, Phi3Config, PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from errors import UserError
from models.architecture.lookup import apply_rope_overrides
from models.layers.rope_scaling import copy_positions, stretch_positions

THETA = 50000.0
GIVEN: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "beta_fast": 16},
    "llama3": {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
}
LENGTHS = {"linear": 512, "dynamic": 128, "yarn": 512, "llama3": 512}


def make_config(**fields: Any) -> LlamaConfig:
    rope = {"rope_type": "default", "rope_theta": THETA}
    return LlamaConfig(**{"max_position_embeddings": 128, "rope_parameters": rope} | fields)


@pytest.mark.parametrize("rope_type", GIVEN)
def test_it_is_the_config_that_a_file_would_hold(rope_type: str) -> None:
    given = {"rope_type": rope_type, **GIVEN[rope_type]}
    config = make_config()
    for _ in range(2):  # the second time nothing is left to do
        stretch_positions(config, given)
        pretrained = {"original_max_position_embeddings": 128} if rope_type in ("yarn", "llama3") else {}
        written = make_config(
            rope_parameters={"rope_theta": THETA, **given, **pretrained}, max_position_embeddings=LENGTHS[rope_type]
        )
        assert config.to_dict() == written.to_dict()
    assert torch.equal(LlamaRotaryEmbedding(config).inv_freq, LlamaRotaryEmbedding(written).inv_freq)
    assert LlamaConfig(**config.to_dict()).to_dict() == config.to_dict()
    other = make_config()
    copy_positions(config, other)
    assert other.to_dict() == config.to_dict()


def test_the_length_that_the_model_was_pretrained_at() -> None:
    stretched = make_config(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": THETA})
    stretch_positions(stretched, {"rope_type": "yarn", "factor": 8.0})
    assert stretched.rope_parameters["original_max_position_embeddings"] == 64
    assert stretched.max_position_embeddings == 512
    phi = Phi3Config(max_position_embeddings=256, original_max_position_embeddings=64)
    stretch_positions(phi, {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32})
    assert phi.max_position_embeddings == phi.original_max_position_embeddings * 2 == 64


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"factor": 2.0}, "rope_parameters.rope_type=null: must be one of linear, dynamic, yarn, llama3"),
        ({"rope_type": "longrope"}, "rope_parameters.rope_type=longrope: must be one of"),
        ({"rope_type": "yarn"}, "rope_type=yarn needs rope_parameters.factor; give it"),
        ({"rope_type": "llama3", "factor": 8}, "rope_parameters.low_freq_factor and rope_parameters.high_freq_factor"),
        (
            {"rope_type": "linear", "factor": 2, "beta_fast": 32},
            "rope_parameters.beta_fast is not a field of rope_type=",
        ),
        ({"rope_type": "linear", "factor": "2x"}, "rope_parameters.factor=2x: a number of more than 0"),
        ({"rope_type": "linear", "factor": 0.5}, "rope_parameters.factor=0.5: at least 1"),
        (
            {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4},
            "rope_parameters.low_freq_factor=4: less than rope_parameters.high_freq_factor=4",
        ),
    ],
)
def test_bad_fields(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        stretch_positions(make_config(), given)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("config", "rope_type", "message"),
    [
        (GPT2Config(), "linear", "a 'gpt2' has no rotary positions; omit it"),
        (Gemma3TextConfig(), "linear", "one for each type of its layers (sliding_attention, full_attention)"),
        (GraniteConfig(), "dynamic", "rope_type=dynamic: the layers of 'granite' come from transformers"),
    ],
    ids=["none", "several", "generic"],
)
def test_models_that_cannot(config: PretrainedConfig, rope_type: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        apply_rope_overrides(config, {"rope_type": rope_type, "factor": 2.0})
    assert message in str(error.value)
