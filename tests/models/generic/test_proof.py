"""The proof of a family without a file finds mistakes: layers that are wrong in one thing are refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from support.published import build_published_config
from transformers import PretrainedConfig

from models.generic.assembly import assemble
from models.generic.family import list_attention
from models.generic.padding import compare_with_rows_alone
from models.generic.proof import BOUND, compare_with_transformers
from models.generic.shrink import shrink
from models.layers.layer import Layer


def build(model_type: str) -> PretrainedConfig:
    config = shrink(build_published_config(model_type))
    config._attn_implementation = list_attention(config)[0]
    return config


@pytest.mark.parametrize(
    ("model_type", "wrong"),
    [
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 11000.0}}),  # a tenth more
        ("glm", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}}),
        ("smollm3", {"no_rope_layers": [1, 1, 1, 1]}),
        ("mixtral", {"sliding_window": None}),
        ("starcoder2", {"sliding_window": 7}),  # one more token
        ("llama4_text", {"attention_chunk_size": 64}),
        ("granite", {"residual_multiplier": 0.23}),
        ("granite", {"attention_multiplier": 0.25}),
        ("granite", {"embedding_multiplier": 1.0}),
        ("granite", {"logits_scaling": 1.0}),
        ("cohere", {"logit_scale": 1.0}),
        ("gemma3_text", {"query_pre_attn_scalar": 200}),
        ("gemma2", {"attn_logit_softcapping": None}),
        ("olmo", {"clip_qkv": None}),
        ("qwen3", {"rms_norm_eps": 1e-4}),
        ("deepseek_v2", {"routed_scaling_factor": 1.0}),
        ("deepseek_v2", {"topk_group": 4}),
    ],
)
def test_a_layer_that_is_wrong_is_caught(model_type: str, wrong: dict[str, Any]) -> None:
    def build_wrong_layers(config: PretrainedConfig) -> list[Layer]:
        altered = copy.deepcopy(config)
        for name, value in wrong.items():
            assert getattr(altered, name) != value
            setattr(altered, name, value)
        return assemble(altered)

    config = build(model_type)
    assert compare_with_transformers(config)[0] < BOUND
    assert compare_with_transformers(config, build_wrong_layers)[0] > 100 * BOUND


@pytest.mark.parametrize("model_type", ["mixtral", "bloom", "qwen3_next"])
def test_padding_after_a_row_does_not_change_it(model_type: str) -> None:
    assert compare_with_rows_alone(build(model_type)) < BOUND
