"""Weights that no layer reads (layers that predict further tokens) are neither lost nor changed by a conversion."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.families import save_family
from support.model_folders import assert_same_bits, convert, export
from support.quantized import quantize_fp8, save_fp8, write_config
from support.tiny import VOCAB_SIZE, save_tokenizer
from support.unused import FAMILIES, WRAPPED, load_export, save_with_unused
from transformers import AutoModelForCausalLM

import convert2ckpt
from errors import UserError
from models.architecture.lookup import build_layers
from models.architecture.unused import FURTHER_LAYERS
from models.heads.head import Labels
from models.heads.sequence_classification import SEQUENCE_CLASSIFICATION
from models.storage.safetensors_writer import INDEX_NAME
from models.weights.edits import edit_weights
from models.weights.new_head import NewHead
from models.weights.passthrough import find_passthrough
from models.weights.quantized import dequantize_fp8
from models.weights.resized_vocab import ResizedVocabulary, grow_rows
from models.weights.sources import open_weights
from models.weights.vocabulary import resize_config

FIRST = "deepseek_v3"
ALL = [pytest.param(name, marks=() if name == FIRST else pytest.mark.full) for name in (*FAMILIES, *WRAPPED)]


def read_config(folder: Path) -> dict[str, Any]:
    fields = json.loads((folder / "config.json").read_text())
    for described in (fields, fields.get("text_config", {})):
        for key in ("dtype", "torch_dtype", "rope_theta", "rope_scaling", "partial_rotary_factor"):
            described.pop(
                key, None
            )  # the dtype is that of the text; those of positions are the names of transformers 4
    return fields


def count_further_layers(folder: Path) -> list[int]:
    fields = read_config(folder)
    levels = (fields, fields.get("text_config", {}))
    return [level[key] for level in levels for key in FURTHER_LAYERS if key in level]


def run_converter(monkeypatch: pytest.MonkeyPatch, source: Path, output: Path, *options: str) -> int:
    arguments = ["--model_name_or_path", str(source), "--output_dir", str(output), *options]
    monkeypatch.setattr(sys, "argv", ["convert2ckpt.py", *arguments])
    monkeypatch.setattr("signal.signal", lambda *_: None)  # pytest keeps its handlers
    return convert2ckpt.main()


@pytest.mark.parametrize("model_type", ALL)
def test_there_and_back_keeps_every_tensor(tmp_path: Path, model_type: str) -> None:
    unused = save_with_unused(tmp_path / "hf", model_type)
    before = load_file(tmp_path / "hf" / "model.safetensors")
    source = open_weights(str(tmp_path / "hf"))
    source.check_complete(build_layers(source.config, source.wrapper))
    assert {info.name for info in find_passthrough(source).unused} == unused.keys()

    converted = convert(tmp_path / "hf", tmp_path / "converted", verify=True, workers=2)
    passthrough = load_file(converted / "carried.safetensors")
    assert passthrough.keys() >= unused.keys() and (len(passthrough) > len(unused)) == (model_type in WRAPPED)
    back = export(converted, tmp_path / "back", verify=True, max_shard_size=100_000)
    index = json.loads((back / INDEX_NAME).read_text())["weight_map"]
    assert_same_bits(load_export(back), before)
    assert index.keys() == before.keys() and read_config(back) == read_config(tmp_path / "hf")

    assert_same_bits(load_export(export(tmp_path / "hf", tmp_path / "direct")), before)
    omitted = export(converted, tmp_path / "less", export_unused=False)
    assert load_export(omitted).keys() == before.keys() - unused.keys()
    assert set(count_further_layers(omitted)) <= {0} and set(count_further_layers(back)) <= {1}


def test_a_converter_says_what_is_passed_through_and_leaves_it_out_when_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    unused = save_with_unused(tmp_path / "hf", FIRST)
    save_tokenizer(tmp_path / "hf")
    assert run_converter(monkeypatch, tmp_path / "hf", tmp_path / "with") == 0
    size = f"{sum(tensor.nbytes for tensor in unused.values()) / 2**20:,.1f} MiB"
    counted = f"{len(unused)} tensors that no layer reads ({size}; model.layers.4: {len(unused)})"
    assert capsys.readouterr().out.splitlines()[0] == f"passed through unchanged: {counted}"
    assert read_config(tmp_path / "with")["num_nextn_predict_layers"] == 1

    assert run_converter(monkeypatch, tmp_path / "hf", tmp_path / "without", "--no_export_unused") == 0
    assert capsys.readouterr().out.splitlines()[0] == f"omitted: {counted}"
    assert not (tmp_path / "without" / "carried.safetensors").exists()
    assert run_converter(monkeypatch, tmp_path / "without", tmp_path / "back", "--to_hf") == 0
    assert load_export(tmp_path / "back").keys().isdisjoint(unused)
    assert read_config(tmp_path / "back")["num_nextn_predict_layers"] == 0
    AutoModelForCausalLM.from_pretrained(tmp_path / "back")


def test_other_forms_of_files_hold_them_too(tmp_path: Path) -> None:
    save_with_unused(tmp_path / "hf", FIRST)
    before = load_file(tmp_path / "hf" / "model.safetensors")
    sharded = export(tmp_path / "hf", tmp_path / "sharded", max_shard_size=50_000)
    assert_same_bits(load_export(export(convert(sharded, tmp_path / "converted"), tmp_path / "back")), before)
    (tmp_path / "hf" / "model.safetensors").unlink()
    torch.save(before, tmp_path / "hf" / "pytorch_model.bin")
    assert_same_bits(load_export(export(tmp_path / "hf", tmp_path / "from_bin")), before)


def test_their_dtype_is_their_own(tmp_path: Path) -> None:
    unused = save_with_unused(tmp_path / "hf", FIRST)
    narrow = load_export(export(tmp_path / "hf", tmp_path / "narrow", dtype=torch.float16))
    assert narrow["model.layers.3.self_attn.o_proj.weight"].dtype == torch.float16
    assert_same_bits({name: narrow[name] for name in unused}, unused)


def test_fp8_is_dequantized_like_the_layers(tmp_path: Path) -> None:
    stored = save_fp8(tmp_path / "hf")
    weight, scales = quantize_fp8(torch.randn(48, 96))
    stored["model.layers.4.eh_proj.weight"], stored["model.layers.4.eh_proj.weight_scale_inv"] = weight, scales
    stored["model.layers.4.enorm.weight"] = torch.ones(48)
    save_file(stored, tmp_path / "hf" / "model.safetensors")
    write_config(tmp_path / "hf", num_nextn_predict_layers=1)
    exported = load_export(export(convert(tmp_path / "hf", tmp_path / "converted"), tmp_path / "back"))
    expected = dequantize_fp8(weight, scales, (8, 8), torch.bfloat16)
    assert torch.equal(exported["model.layers.4.eh_proj.weight"], expected)
    assert {name for name in exported if name.startswith("model.layers.4.")} == {
        "model.layers.4.eh_proj.weight",
        "model.layers.4.enorm.weight",
    }


def test_copies_of_the_vocabulary_get_its_new_rows(tmp_path: Path) -> None:
    """Servers give them as many rows as config.json says."""
    unused = save_with_unused(tmp_path / "hf", FIRST)
    copies = {"model.layers.4.embed_tokens.weight", "model.layers.4.shared_head.head.weight"}
    grown = {name: grow_rows(t, 512) if name in copies else t for name, t in unused.items()}
    converted = convert(tmp_path / "hf", tmp_path / "padded", pad_vocab_to_multiple_of=512)
    assert_same_bits(load_file(converted / "carried.safetensors"), grown)
    exported = load_export(export(converted, tmp_path / "unpadded", unpad_vocab=True))
    assert_same_bits(exported, load_file(tmp_path / "hf" / "model.safetensors"))

    base = open_weights(str(tmp_path / "hf"))
    source = edit_weights(base, [ResizedVocabulary(resize_config(base, VOCAB_SIZE + 7))])  # of a run that adds tokens
    source.check_complete(build_layers(source.config))
    for info in source.list_passthrough():
        tensor = source.read_passthrough(info.name)
        assert tensor.shape == info.shape and len(tensor) == len(unused[info.name]) + 7 * (info.name in copies)


def test_mistakes_are_not_passed_through(tmp_path: Path) -> None:
    save_with_unused(tmp_path / "hf", FIRST)
    file = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(file)
    for name in (
        "model.layers.3.mlp.misnamed.weight",
        "model.layers.5.eh_proj.weight",  # beyond those that config.json counts
        "model_mtp.fc.weight",
    ):
        save_file({**tensors, name: torch.ones(3)}, file)
        with pytest.raises(UserError, match=f"1 tensor of no layer of a 'deepseek_v3', first '{name}'"):
            convert(tmp_path / "hf", tmp_path / "converted")


def test_a_decoder_layer_beyond_the_last_is_not_one_that_predicts_further(tmp_path: Path) -> None:
    """config.json with one layer too few: the model would silently be trained without its last layer."""
    save_with_unused(tmp_path / "hf", FIRST)
    file = tmp_path / "hf" / "model.safetensors"
    save_file({name: t for name, t in load_file(file).items() if ".layers.4." not in name}, file)
    write_config(tmp_path / "hf", num_hidden_layers=3)
    with pytest.raises(UserError, match=r"tensors of no layer of a 'deepseek_v3', first 'model.layers.3."):
        convert(tmp_path / "hf", tmp_path / "converted")


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    save_with_unused(tmp_path / "hf", FIRST)
    converted = convert(tmp_path / "hf", tmp_path / "converted")
    (converted / "carried.safetensors").unlink()
    with pytest.raises(UserError, match=r"carried.safetensors is missing: the tensors that training does not change"):
        export(converted, tmp_path / "back")


def test_a_flipped_byte_is_found(tmp_path: Path) -> None:
    save_with_unused(tmp_path / "hf", FIRST)
    converted = convert(tmp_path / "hf", tmp_path / "converted")
    file = converted / "carried.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(UserError, match=f"{file} is damaged: its bytes are not those that were saved; copy"):
        export(converted, tmp_path / "back")


def test_a_reward_model_keeps_them(tmp_path: Path) -> None:
    """Its own folder, and one that a run makes a reward model of."""
    unused = save_with_unused(tmp_path / "hf", FIRST)
    new_head = NewHead(SEQUENCE_CLASSIFICATION, Labels(num_labels=1), seed=0)
    new = edit_weights(open_weights(str(tmp_path / "hf")), [new_head])
    assert_same_bits({info.name: new.read_passthrough(info.name) for info in new.list_passthrough()}, unused)
    fields = read_config(tmp_path / "hf") | {"architectures": ["DeepseekV3ForSequenceClassification"], "num_labels": 1}
    file = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(file)
    tensors["score.weight"] = tensors.pop("lm_head.weight")[:1].clone()
    save_file(tensors, file)
    (tmp_path / "hf" / "config.json").write_text(json.dumps(fields))
    assert_same_bits(load_export(export(tmp_path / "hf", tmp_path / "back")), tensors)


def test_what_is_computed_is_not_passed_through(tmp_path: Path) -> None:
    """Masks of old exports. A pattern of GPT-2's names `c_attn.bias` too, which its layers read."""
    save_family(tmp_path / "gpt2", "gpt2", tied=True)
    file = tmp_path / "gpt2" / "model.safetensors"
    tensors = load_file(file)
    mask = {"transformer.h.0.attn.bias": torch.ones(1, 1, 8, 8, dtype=torch.uint8)}
    for prefix in ("", "transformer."):  # those on the hub lack it
        save_file({name.removeprefix(prefix): tensor for name, tensor in (tensors | mask).items()}, file)
        assert open_weights(str(file.parent)).list_passthrough() == []
        assert_same_bits(load_export(export(file.parent, tmp_path / "back", overwrite=True)), tensors)


@pytest.mark.full
def test_what_a_pattern_calls_ignored_may_be_computed(tmp_path: Path) -> None:
    save_family(tmp_path / "hf", "gpt_neox")
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    masks = {"gpt_neox.layers.0.attention.bias": torch.ones(1, 1, 8, 8, dtype=torch.uint8)}
    save_file(tensors | masks, tmp_path / "hf" / "model.safetensors")
    assert_same_bits(load_export(export(tmp_path / "hf", tmp_path / "back")), tensors)


@pytest.mark.full
def test_a_folder_from_before_has_none(tmp_path: Path) -> None:
    save_with_unused(tmp_path / "hf", FIRST)
    converted = convert(tmp_path / "hf", tmp_path / "converted")
    (converted / "carried.safetensors").unlink()
    fields = json.loads((converted / "config.json").read_text())
    del fields["passthrough_tensors"]
    (converted / "config.json").write_text(json.dumps(fields))
    export(converted, tmp_path / "back")


@pytest.mark.full
def test_names_are_added_once(tmp_path: Path) -> None:
    """A Qwen3.5 saved as its text model: its patterns name the tower of the whole."""
    unused = save_with_unused(tmp_path / "hf", "qwen3_5_text")
    file = tmp_path / "hf" / "model.safetensors"
    tower = {"model.visual.patch_embed.proj.weight": torch.ones(4, 3).bfloat16()}
    save_file(load_file(file) | tower, file)
    converted = convert(tmp_path / "hf", tmp_path / "converted")
    assert_same_bits(load_file(converted / "carried.safetensors"), unused | tower)
