"""Families without a file: proven on a small model, or refused with what is missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from support.chain import BOUND, Chain, difference, positions, tokens
from support.families import build_family, build_family_config
from support.model_folders import assert_same_bits, convert, export
from support.published import build_published_config
from transformers import AutoConfig, AutoModelForCausalLM

from errors import UserError
from models.architecture.lookup import ARCHITECTURES, LATER_RELEASES, build_layers, check_length, unsupported
from models.generic.family import find_fault
from models.generic.obstacles import list_obstacles
from models.generic.shrink import shrink
from models.layers.wrapped import unwrap
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
    ("model_type", "fields"),
    [
        ("granite", {"embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.22}),
        ("cohere", {"logit_scale": 0.0625}),
        ("gemma3_text", {}),  # a scaled embedding, an angle for each type of layer
        ("llama4_text", {"attention_chunk_size": 8}),
        ("gpt_neox", {}),  # a parallel residual
        ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 8}),  # fills in its config while it is built
        ("bloom", {"n_head": 4, "hidden_size": 64}),  # ALiBi, a norm after the embedding
        ("opt", {"word_embed_proj_dim": 32, "ffn_dim": 64}),  # learned positions, projections around the layers
    ],
)
def test_what_a_model_does_around_its_layers_is_read_from_it(model_type: str, fields: dict[str, Any]) -> None:
    config = shrink(AutoConfig.for_model(model_type, **fields))
    assert all(
        getattr(config, name) == value for name, value in fields.items() if name not in ("ffn_dim", "num_kv_heads")
    )
    assert find_fault(config) is None


@pytest.mark.parametrize(
    ("family", "known"),
    [
        ("opt", 256),  # its table begins with two extra rows
        pytest.param("gpt_neo", 256, marks=pytest.mark.full),
        pytest.param("gptj", 256, marks=pytest.mark.full),  # a table of angles in each layer
        pytest.param("bloom", None, marks=pytest.mark.full),
        pytest.param("gpt_neox", None, marks=pytest.mark.full),
    ],
)
def test_samples_longer_than_a_table_of_positions_are_refused(family: str, known: int | None) -> None:
    config = build_family_config(family)
    check_length(config, known or 10**6)
    if known is not None:
        with pytest.raises(
            UserError, match=f"max_seq_length={known + 1}, but this '{family}' has a table of {known} pos"
        ):
            check_length(config, known + 1)


@pytest.mark.parametrize(
    ("model_type", "key"),
    [("opt", "max_position_embeddings"), ("gptj", "n_positions"), ("gpt_neo", "max_position_embeddings")],
)
@pytest.mark.parametrize("count", [64, 16])
def test_a_short_table_of_positions_is_accepted(model_type: str, key: str, count: int) -> None:
    config = AutoConfig.for_model(model_type, **{key: count})
    build_layers(config)
    check_length(config, count)
    with pytest.raises(UserError, match=f"this '{model_type}' has a table of {count} positions"):
        check_length(config, count + 1)


def test_an_embedding_as_wide_as_the_layers_needs_no_projection() -> None:
    config = AutoConfig.for_model("opt")
    assert config.word_embed_proj_dim == config.hidden_size
    build_layers(config)


def test_dropout_of_a_backbone_is_for_training_alone() -> None:
    model = build_family("starcoder2", embedding_dropout=0.5)
    chain = Chain(model.eval()).eval()
    with torch.no_grad():
        expected = model(tokens()).logits
        assert difference(chain(tokens(), positions()), expected) < BOUND
        assert difference(chain.train()(tokens(), positions()), expected) > 0.1


@pytest.mark.parametrize(
    ("model_type", "missing"),
    [
        ("inkling2_text", "its layer 1 is given 'block_states' in addition to hidden states, which depends on weights"),
        ("axk2", "has no gradient from the loss of tokens"),
        ("modernbert-decoder", "its embedding is 'model.embeddings.tok_embeddings' and its layers are in 'model'"),
    ],
)
def test_what_stages_cannot_do_is_refused(model_type: str, missing: str) -> None:
    with pytest.raises(
        UserError, match=f"model_type '{model_type}' has no file in models/.*{missing}.*docs/add_a_model.md"
    ):
        build_layers(AutoConfig.for_model(model_type))


def test_a_model_that_is_not_a_causal_language_model_is_refused() -> None:
    with pytest.raises(UserError, match="model_type 't5' is not supported; known: .*llama"):
        build_layers(AutoConfig.for_model("t5"))


def test_a_family_of_a_later_release_is_named_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LATER_RELEASES, "of_later", "99.1.0")
    message = f"model_type 'of_later' needs transformers 99.1.0 or newer, and {transformers.__version__} is installed"
    assert unsupported("of_later") == message
    monkeypatch.setitem(LATER_RELEASES, "llama", "99.1.0")
    assert unsupported("llama").startswith("model_type 'llama' is not supported")  # what is installed has it


STREAMS = "hyper-connections (4 streams of hidden states, where a stage sends one)"
INDEXERS = "indexers, which are trained to another loss"
CHOSEN = "layers that attend to the tokens that earlier ones have chosen"


@pytest.mark.parametrize(
    ("model_type", "obstacles"),
    [
        ("mistral_large4", ["layers that use the keys and values of earlier ones", CHOSEN, INDEXERS]),
        ("qwen4_exp", [STREAMS, "layers with embeddings of hashed n-grams of the tokens", INDEXERS]),
        ("glm5_next", [STREAMS, INDEXERS]),
        ("hy_v4", [STREAMS, CHOSEN, INDEXERS]),
        ("deepseek_v4", [STREAMS, "experts that a hash of the token chooses", INDEXERS]),
        ("axk2", []),  # an indexer alone: the proof finds it
        ("gemma4_text", []),
    ],
)
def test_all_that_stands_in_the_way_is_named(model_type: str, obstacles: list[str]) -> None:
    config = build_published_config(model_type)
    text = getattr(config, "text_config", config)
    assert list_obstacles(text) == obstacles
    if obstacles:
        assert find_fault(text) == f"it has {'; '.join(obstacles)}"


@pytest.mark.parametrize(
    ("model_type", "sections"),
    [
        ("glm4v", [1, 2, 1]),  # of the [8, 12, 12] of a half of each head
        ("glm_ocr", [2, 3, 3]),  # which its config does not name
        ("qwen2_vl", [2, 3, 3]),
        ("ernie4_5_vl_moe", [3, 3, 2]),  # of [22, 22, 20]: the first two have to be alike
    ],
)
def test_a_small_rope_has_parts_of_the_same_proportions(model_type: str, sections: list[int]) -> None:
    text, _ = unwrap(build_published_config(model_type))
    small = shrink(text)
    assert small.rope_parameters["mrope_section"] == sections
    assert sum(sections) * 2 == small.hidden_size // small.num_attention_heads * small.rope_parameters.get(
        "partial_rotary_factor", 1
    )
