"""Every family as its list of layers, in one process and without DeepSpeed, against the Hugging Face model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.chain import BOUND, B, Chain, difference, positions, tokens
from support.families import FAMILIES, build_family, build_family_config, save_family
from support.model_folders import assert_same_bits, convert, export, load_transformers
from support.published import build_published_config
from support.tiny import VOCAB_SIZE, save_tokenizer
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel

from batch import Targets
from data.collator import shift_labels
from errors import UserError
from models.architecture.lookup import (
    ARCHITECTURES,
    build_layers,
    check_length,
    choose_attention,
    choose_experts,
    warn_of_length,
)
from models.experts.grouped import GROUPED
from models.experts.sizes import count_experts
from models.losses.cross_entropy import build_loss
from models.weights.sources import open_weights
from models.weights.vocabulary import SpecialTokens

TIED = pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
EVERY_FAMILY = pytest.mark.parametrize("model_type", sorted(FAMILIES))


def hf_logits(model: PreTrainedModel, input_ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids, use_cache=False).logits


def chain_loss(chain: Chain, model: PreTrainedModel, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    targets = shift_labels(labels)
    count = torch.tensor(float((targets != -100).sum()))
    return build_loss(model.config)(chain.run(input_ids, positions(input_ids.shape[1])), Targets.find(targets, count))


def test_the_table_and_the_tests_name_the_same_families() -> None:
    assert FAMILIES.keys() == ARCHITECTURES.keys()


@EVERY_FAMILY
@TIED
def test_loss_and_every_gradient_are_hugging_faces(model_type: str, tied: bool) -> None:
    model = build_family(model_type, tied).train()
    chain = Chain(model)
    input_ids = tokens()
    input_ids[:, -3:] = model.config.pad_token_id
    labels = input_ids.clone()
    labels[:, -3:] = labels[:, :4] = -100
    expected = model(input_ids, labels=labels, attention_mask=(input_ids != 0).long(), use_cache=False).loss
    loss = chain_loss(chain, model, input_ids, labels)
    assert difference(loss, expected) < BOUND
    expected.backward()
    loss.backward()
    gradients, named = chain.gradients(), dict(model.named_parameters())
    assert gradients.keys() == {name for name, parameter in named.items() if parameter.grad is not None}
    for name, gradient in gradients.items():
        assert difference(gradient, named[name].grad) < BOUND, name


@EVERY_FAMILY
def test_documents_packed_into_a_row_do_not_see_each_other(model_type: str) -> None:
    model = build_family(model_type).eval()
    chain = Chain(model).eval()
    lengths = (11, 1, 7, 5)
    packed = torch.cat([torch.arange(length) for length in lengths]).repeat(B, 1)
    input_ids = tokens()
    with torch.no_grad():
        logits = chain(input_ids, packed)
        alone = torch.cat([hf_logits(model, document) for document in input_ids.split(lengths, dim=1)], dim=1)
        assert difference(logits, alone) < BOUND
        assert difference(chain(input_ids, positions())[:, 12:], alone[:, 12:]) > 1e-4  # the test can tell


@EVERY_FAMILY
@pytest.mark.parametrize(
    ("tied", "dtype"),
    [
        pytest.param(False, torch.float32, id="fp32-untied"),
        pytest.param(True, torch.bfloat16, id="bf16-tied"),
        pytest.param(True, torch.float32, id="fp32-tied", marks=pytest.mark.full),
        pytest.param(False, torch.bfloat16, id="bf16-untied", marks=pytest.mark.full),
    ],
)
def test_round_trip_is_bit_exact(model_type: str, tied: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    build_family(model_type, tied).to(dtype).save_pretrained(tmp_path / "hf")
    back = export(convert(tmp_path / "hf", tmp_path / "pipeline"), tmp_path / "back")
    assert_same_bits(load_file(back / "model.safetensors"), load_file(tmp_path / "hf" / "model.safetensors"))
    assert_same_bits(load_transformers(back), load_transformers(tmp_path / "hf"))


@EVERY_FAMILY
def test_a_converted_folder_and_its_source_give_the_same_layers(model_type: str, tmp_path: Path) -> None:
    source = open_weights(str(save_family(tmp_path / "hf", model_type)))
    converted = open_weights(str(convert(tmp_path / "hf", tmp_path / "pipeline")))
    layers = build_layers(source.config)
    for weights in (source, converted):
        weights.check_complete(layers)
    for index, layer in enumerate(layers):
        assert_same_bits(converted.read_layer(index, layer), source.read_layer(index, layer))


def test_names_without_the_models_prefix_are_understood(tmp_path: Path) -> None:
    """gpt2 on the hub was saved without its head: `wte.weight`, not `transformer.wte.weight`. It also holds causal
    masks."""
    save_family(tmp_path, "gpt2", tied=True)
    saved = load_file(tmp_path / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in saved.items()}
    save_file(
        {**bare, "h.0.attn.bias": torch.ones(1, 1, 4, 4), "h.0.attn.masked_bias": torch.tensor(-1e4)},
        tmp_path / "model.safetensors",
    )
    source = open_weights(str(tmp_path))
    layers = build_layers(source.config)
    source.check_complete(layers)
    read = {
        layer.hf_prefix + name: tensor
        for i, layer in enumerate(layers)
        for name, tensor in source.read_layer(i, layer).items()
    }
    assert_same_bits(read, saved)


@pytest.mark.parametrize("field", ["prefix_lm", "qk_ln"])
def test_an_mpt_with_features_that_transformers_leaves_out_is_refused(field: str) -> None:
    config = AutoConfig.for_model("mpt", attn_config={field: True})
    with pytest.raises(UserError, match=f"attn_config.{field}=True"):
        build_layers(config)


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    save_family(tmp_path, "deepseek_v3")
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, "model.layers.4.embed_tokens.weight": torch.zeros(3)}, tmp_path / "model.safetensors")
    source = open_weights(str(tmp_path))
    source.check_complete(build_layers(source.config))


def test_samples_longer_than_a_table_of_positions_are_refused() -> None:
    config = build_family("gpt2").config
    check_length(config, 256)
    with pytest.raises(UserError, match="max_seq_length=300.*a table of 256 positions"):
        check_length(config, 300)


def test_samples_longer_than_rotary_angles_were_made_for_give_a_warning() -> None:
    config = build_family("llama").config
    known = config.max_position_embeddings
    check_length(config, known + 1)
    assert warn_of_length(config, known) == "" and f"max_seq_length={known + 1} is more than" in warn_of_length(
        config, known + 1
    )
    assert warn_of_length(build_family("mpt").config, 10**6) == ""


def test_attention_is_the_familys_first_or_one_that_it_has() -> None:
    assert {name: choose_attention(build_family(name).config, "auto") for name in ("llama", "gemma2", "mpt")} == {
        "llama": "sdpa",
        "gemma2": "eager",
        "mpt": "eager",
    }
    with pytest.raises(
        UserError, match="attn_implementation=sdpa cannot be used with 'gemma2'; it has eager, flash_attention_2"
    ):
        choose_attention(build_family("gemma2").config, "sdpa")


def test_experts_are_computed_one_by_one_where_torchs_grouped_product_cannot_take_their_rows() -> None:
    """24 columns per expert: 12 per rank at tensor_parallel_size=2, 24 bytes in bf16. Our grouped
    product takes them."""
    config = build_family_config("deepseek_v3")
    build_layers(config)
    assert choose_experts(config, 2, torch.bfloat16) == config._experts_implementation == GROUPED
    config._experts_implementation = "grouped_mm"
    chosen = [
        choose_experts(config, size, dtype)
        for size, dtype in ((1, torch.bfloat16), (2, torch.float32), (2, torch.bfloat16))
    ]
    assert chosen == ["grouped_mm", "grouped_mm", "eager"]
    config._experts_implementation = "batched_mm"
    assert choose_experts(config, 2, torch.bfloat16) == "batched_mm"
    assert choose_experts(config, 1, torch.bfloat16, expert_parallel_size=2) == GROUPED  # the only one that sends rows
    assert choose_experts(build_family_config("llama"), 2, torch.bfloat16) is None


@pytest.mark.parametrize(
    ("family", "chosen", "available"), [("aria_text", 2, 8), ("dbrx", 2, 8), ("gemma4_text", 8, 128)]
)
def test_experts_are_counted_and_grouped_whatever_the_config_calls_them(
    family: str, chosen: int, available: int
) -> None:
    config = build_published_config(family)
    assert not hasattr(config, "num_experts_per_tok")
    assert count_experts(config) == (chosen, available)
    assert choose_experts(config, 1, torch.bfloat16) == GROUPED


def test_a_number_of_experts_for_each_layer() -> None:
    config = AutoConfig.for_model("hunyuan_v1_moe", num_hidden_layers=2, moe_topk=[8, 8], num_experts=64)
    assert count_experts(config) == (8, 64)


def test_vocabulary_is_that_of_the_table() -> None:
    for model_type in FAMILIES:
        assert build_family(model_type).config.vocab_size == VOCAB_SIZE


def test_windows_and_caps_bite() -> None:
    """Without them the logits differ: the parity tests above would notice a layer that leaves them out."""
    input_ids = tokens()
    for model_type, field, off in (
        ("mistral", "sliding_window", None),
        ("phi3", "sliding_window", None),
        ("qwen2", "use_sliding_window", False),
        ("gemma2", "attn_logit_softcapping", None),
        ("gemma2", "final_logit_softcapping", None),
    ):
        with torch.no_grad():
            logits, without = (
                hf_logits(model.eval(), input_ids)
                for model in (build_family(model_type), build_family(model_type, **{field: off}))
            )
        assert difference(logits, without) > 1e-3, (model_type, field)


@EVERY_FAMILY
@TIED
def test_a_padded_vocabulary_goes_there_and_back(model_type: str, tied: bool, tmp_path: Path) -> None:
    build_family(model_type, tied).save_pretrained(tmp_path / "hf")
    padded = convert(tmp_path / "hf", tmp_path / "pipeline", pad_vocab_to_multiple_of=128)
    config = open_weights(str(padded)).config
    assert config.vocab_size == 384 and config.unpadded_vocab_size == VOCAB_SIZE
    loaded = load_transformers(export(padded, tmp_path / "padded"))
    original = load_transformers(tmp_path / "hf")
    assert set({name: t.shape[0] for name, t in loaded.items() if t.shape != original[name].shape}.values()) == {384}
    back = export(padded, tmp_path / "back", unpad_vocab=True)
    assert_same_bits(load_file(back / "model.safetensors"), load_file(tmp_path / "hf" / "model.safetensors"))
    assert "unpadded_vocab_size" not in (back / "config.json").read_text()
    with pytest.raises(UserError, match="names no unpadded_vocab_size"):
        export(tmp_path / "hf", tmp_path / "other", unpad_vocab=True)


def test_a_token_that_takes_a_padded_row_is_not_cut_off(tmp_path: Path) -> None:
    build_family("llama").save_pretrained(tmp_path / "hf")
    save_tokenizer(tmp_path / "hf")
    padded = convert(tmp_path / "hf", tmp_path / "padded", pad_vocab_to_multiple_of=128)
    with_token = convert(padded, tmp_path / "token", special_tokens=SpecialTokens(extra=("<tool>",)))
    assert open_weights(str(with_token)).config.vocab_size == 384
    back = export(with_token, tmp_path / "back", unpad_vocab=True)
    assert (
        AutoConfig.from_pretrained(back).vocab_size
        == AutoTokenizer.from_pretrained(back).convert_tokens_to_ids("<tool>") + 1
    )
