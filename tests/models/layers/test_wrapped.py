"""Models that wrap a text model: which part is trained, and that a folder's names, old or new, are read and written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.model_folders import assert_same_bits, convert, export
from support.wrapped import WRAPPED, build_wrapped, save_wrapped
from transformers import AutoConfig, Mistral3ForConditionalGeneration, PreTrainedModel

from errors import UserError
from models.architecture.lookup import build_layers
from models.conversion.convert import convert_to_pipeline
from models.generic import wrapped_proof
from models.generic.shrink import shrink
from models.layers.wrapped import unwrap
from models.weights.config_file import parse_config
from models.weights.sources import open_weights
from models.weights.vocabulary import add_eos_token_id
from scripts.generate import load_model

ALL = [pytest.param(name, marks=() if name == "mistral3" else pytest.mark.full) for name in sorted(WRAPPED)]
Models = Callable[[str], tuple[Path, PreTrainedModel]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """models(model_type): its Hugging Face folder and the model, made on first use."""
    root = tmp_path_factory.mktemp("wrapped")
    made: dict[str, PreTrainedModel] = {}

    def find(model_type: str) -> tuple[Path, PreTrainedModel]:
        if model_type not in made:
            made[model_type] = save_wrapped(root / model_type, model_type)
        return root / model_type, made[model_type]

    return find


def save_as(folder: Path, original: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """Save the model of `original` with these tensors."""
    folder.mkdir()
    (folder / "config.json").write_bytes((original / "config.json").read_bytes())
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def read_config(folder: Path) -> dict[str, Any]:
    """Return config.json without the dtype, which is that of the text, where `transformers` writes that of the first
    tensor, and without the names of transformers 4 for rotary positions."""
    fields = json.loads((folder / "config.json").read_text())
    for described in (fields, fields["text_config"]):
        for key in ("dtype", "torch_dtype", "rope_theta", "rope_scaling", "partial_rotary_factor"):
            described.pop(key, None)
    return fields


@pytest.mark.parametrize("model_type", ALL)
def test_there_and_back_with_the_bits_and_names_of_the_source(models: Models, tmp_path: Path, model_type: str) -> None:
    folder, _ = models(model_type)
    converted = convert(folder, tmp_path / "converted", verify=True, workers=2)
    back = export(converted, tmp_path / "back", verify=True, max_shard_size=100_000)
    before = load_file(folder / "model.safetensors")
    after = {name: t for file in back.glob("*.safetensors") for name, t in load_file(file).items()}
    assert_same_bits(after, before)
    assert read_config(back) == read_config(folder)
    assert (back / "preprocessor_config.json").is_file()

    passthrough = load_file(converted / "carried.safetensors")
    assert {tensor.dtype for tensor in passthrough.values()} == {torch.bfloat16} and passthrough.keys() < before.keys()
    narrow = export(converted, tmp_path / "narrow", dtype=torch.float16)
    changed = load_file(narrow / "model.safetensors")
    assert passthrough.keys() == {name for name, tensor in changed.items() if tensor.dtype == torch.bfloat16}
    assert_same_bits({name: changed[name] for name in passthrough}, passthrough)


@pytest.mark.parametrize("model_type", ALL)
def test_names_of_memory_are_read_too(models: Models, tmp_path: Path, model_type: str) -> None:
    folder, model = models(model_type)
    model.save_pretrained(tmp_path / "new", save_original_format=False)
    source, renamed = open_weights(str(folder)), open_weights(str(tmp_path / "new"))
    layers = build_layers(source.config, source.wrapper)
    for each in (source, renamed):
        each.check_complete(layers)
    for index, layer in enumerate(layers):
        assert_same_bits(renamed.read_layer(index, layer), source.read_layer(index, layer))
    assert len(renamed.list_passthrough()) == len([n for n in model.state_dict() if not source.wrapper.is_text(n)])


@pytest.mark.full
def test_experts_are_read_either_way_round(models: Models, tmp_path: Path) -> None:
    folder, _ = models("qwen3_vl_moe")
    turned = {
        name: tensor.mT if ".mlp.experts." in name else tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    assert any(tensor.dim() == 3 and tensor.shape[1] != tensor.shape[2] for tensor in turned.values())
    published = save_as(tmp_path / "hub", folder, turned)
    back = export(convert(published, tmp_path / "pipeline", verify=True), tmp_path / "back", verify=True)
    assert_same_bits(load_file(back / "model.safetensors"), load_file(folder / "model.safetensors"))


def test_the_whole_model_says_whether_the_head_is_tied() -> None:
    for outer, inner in ((True, False), (False, True)):
        config = build_wrapped("mistral3", tie_word_embeddings=outer).config
        config.text_config.tie_word_embeddings = inner
        text, wrapper = unwrap(config)
        assert text.tie_word_embeddings is outer
        layers = build_layers(text, wrapper)
        assert layers[-1].owns_weights is not outer
        assert layers[0].get_pieces("weight")[0].hf_name == "language_model.model.embed_tokens.weight"
        assert layers[1].hf_prefix == "model.language_model.layers.0."


def test_a_model_that_does_something_else_with_text_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = Mistral3ForConditionalGeneration.forward

    def scaled(self, input_ids, **options):
        output = forward(self, input_ids, **options)
        output.logits = output.logits * 1.01
        return output

    monkeypatch.setattr(Mistral3ForConditionalGeneration, "forward", scaled)
    monkeypatch.setattr(wrapped_proof, "_proven", {})
    text, wrapper = unwrap(build_wrapped("mistral3").config)
    with pytest.raises(
        UserError, match="a 'mistral3' cannot be trained as its 'mistral' alone: given text, '.*' of a sm"
    ):
        build_layers(text, wrapper)


def test_llama_4_is_taken_in_every_release() -> None:
    text, wrapper = unwrap(build_wrapped("llama4").config)
    assert len(build_layers(text, wrapper)) == text.num_hidden_layers + 3


def test_a_stated_model_is_a_text_model() -> None:
    fields = AutoConfig.for_model("mistral3", **WRAPPED["mistral3"]).to_dict()
    with pytest.raises(UserError, match="model_type 'mistral3' wraps a text model.*give model_type 'mistral'"):
        parse_config(fields, Path("conf/model"))


def test_missing_and_quantized_passthrough_tensors_are_refused(models: Models, tmp_path: Path) -> None:
    folder, _ = models("mistral3")
    tensors = load_file(folder / "model.safetensors")
    gone = "multi_modal_projector.linear_1.weight"
    del tensors[gone]
    with pytest.raises(UserError, match=f"missing tensors: 1, first 'model.{gone}'"):
        convert(save_as(tmp_path / "hf", folder, tensors), tmp_path / "converted")
    tensors[gone] = torch.zeros(48, 32).to(torch.float8_e4m3fn)
    with pytest.raises(UserError, match=f"'{gone}' belongs to a quantized tensor outside the text model"):
        convert(save_as(tmp_path / "fp8", folder, tensors), tmp_path / "converted")


def test_a_vocabulary_grows_in_the_text_config(models: Models, tmp_path: Path) -> None:
    folder, _ = models("mistral3")
    convert_to_pipeline(open_weights(str(folder)), tmp_path / "padded", pad_vocab_to_multiple_of=256)
    fields = json.loads((tmp_path / "padded" / "config.json").read_text())
    assert fields["text_config"]["vocab_size"] == 512 and fields["text_config"]["unpadded_vocab_size"] == 320
    assert "vocab_size" not in fields
    back = export(tmp_path / "padded", tmp_path / "back", unpad_vocab=True)
    assert_same_bits(load_file(back / "model.safetensors"), load_file(folder / "model.safetensors"))


def test_small_models_keep_the_kinds_of_positions() -> None:
    text, _ = unwrap(build_wrapped("qwen3_vl").config)
    text.rope_parameters = {**text.rope_parameters, "mrope_section": [24, 20, 20]}
    text.head_dim = 128
    assert sum(shrink(text).rope_parameters["mrope_section"]) == shrink(text).head_dim // 2


def test_an_end_token_is_added_where_the_config_has_one(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    for before, after in (
        ({"text_config": {}}, {"text_config": {"eos_token_id": 7}}),
        ({"text_config": {"eos_token_id": 2}}, {"text_config": {"eos_token_id": [2, 7]}}),
        ({"eos_token_id": [7, 1], "text_config": {}}, {"eos_token_id": [7, 1], "text_config": {}}),
        ({"eos_token_id": 1, "text_config": {"eos_token_id": 1}}, None),
    ):
        file.write_text(json.dumps(before))
        add_eos_token_id(file, 7)
        both = {"eos_token_id": [1, 7], "text_config": {"eos_token_id": [1, 7]}}
        assert json.loads(file.read_text()) == (after or both)


def test_the_text_model_alone_gives_the_logits_of_the_whole(models: Models) -> None:
    """scripts/generate.py answers with it."""
    folder, model = models("mistral3")
    alone = load_model(open_weights(str(folder))).float()
    input_ids = torch.arange(3, 23)[None]
    with torch.no_grad():
        expected, logits = (each.eval()(input_ids, use_cache=False).logits for each in (model, alone))
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
