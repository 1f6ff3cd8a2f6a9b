"""Numbers in config.json that no model can have are refused before anything is built from them."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import LlamaConfig

from errors import UserError
from models.storage.declared_sizes import check_least


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("num_key_value_heads", 3, "num_key_value_heads is 3, and must divide 4, num_attention_heads"),
        ("rms_norm_eps", float("nan"), "rms_norm_eps is nan, and must be 0 or more"),
        ("attention_dropout", 5, "attention_dropout is 5, and must be from 0 to 1"),
        ("max_position_embeddings", -1, "max_position_embeddings is -1, and must be 1 or more"),
        ("v_head_dim", 0, "v_head_dim is 0, and must be 1 or more"),
        ("rope_parameters", {"rope_type": "default", "rope_theta": -5.0}, "rope_theta is -5.0, and must be above 0"),
    ],
)
def test_a_number_out_of_its_range(name: str, value: object, message: str) -> None:
    config = LlamaConfig(hidden_size=32, num_attention_heads=4, num_key_value_heads=2)
    check_least(config, Path("config.json"))
    setattr(config, name, value)
    with pytest.raises(UserError, match=f"config.json: {message}"):
        check_least(config, Path("config.json"))
