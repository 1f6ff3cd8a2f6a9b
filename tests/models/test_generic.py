"""Families without a file, through the plan that `transformers` publishes: proven on a small model, or refused with
what is missing.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.model_folders import assert_same_bits, convert, export
from test_decoder import BOUND, Chain, difference, positions, tokens
from transformers import AutoConfig, AutoModelForCausalLM

from errors import UserError
from models.architecture import ARCHITECTURES, build_layers
from models.generic.shrink import shrink
from models.weights.sources import open_weights


@pytest.mark.parametrize("model_type", ["smollm3", "glm4", "arcee"])
def test_a_published_family_works_without_a_file(model_type: str, tmp_path: Path) -> None:
    assert model_type not in ARCHITECTURES
    torch.manual_seed(0)
    config = shrink(AutoConfig.for_model(model_type))
    config.vocab_size = 320
    model = AutoModelForCausalLM.from_config(config).eval()
    chain = Chain(model)
    with torch.no_grad():
        assert difference(chain(tokens(), positions()), model(tokens()).logits) < BOUND
    model.save_pretrained(tmp_path / "hf")
    back = export(convert(tmp_path / "hf", tmp_path / "pipeline"), tmp_path / "back")
    assert_same_bits(load_file(back / "model.safetensors"), load_file(tmp_path / "hf" / "model.safetensors"))
    assert open_weights(str(back)).config.model_type == model_type


@pytest.mark.parametrize(
    ("model_type", "fields", "missing"),
    [
        (
            "granite",
            {"embedding_multiplier": 12.0},
            "it does something else beside, since '.*' of a small model differs by",
        ),
        ("granite", {"logits_scaling": 8.0}, "it does something else beside"),
        ("gemma", {}, "its embedding is a GemmaTextScaledWordEmbedding"),
        ("phi", {}, "it has other parts than embed_tokens, layers and norm"),
        ("olmo", {}, "its final norm is a OlmoLayerNorm"),
    ],
)
def test_what_its_plan_does_not_tell_is_refused(model_type: str, fields: dict[str, float], missing: str) -> None:
    with pytest.raises(
        UserError, match=f"model_type '{model_type}' has no file in models/.*{missing}.*docs/add_a_model.md"
    ):
        build_layers(AutoConfig.for_model(model_type, **fields))


def test_a_granite_without_multipliers_is_taken() -> None:
    assert len(build_layers(shrink(AutoConfig.for_model("granite")))) == 4 + 3


def test_what_is_no_causal_language_model_is_refused() -> None:
    with pytest.raises(UserError, match="model_type 't5' is not supported; known: .*llama"):
        build_layers(AutoConfig.for_model("t5"))
