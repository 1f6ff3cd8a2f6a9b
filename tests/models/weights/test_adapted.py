"""Adapters merged into their base, against peft's own merge of the whole model."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from support.adapters import make_adapter
from support.families import build_family_config, save_family
from support.model_folders import convert, export
from support.tiny import save_llama, save_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from errors import UserError
from models.adapters.build import build_adapter
from models.adapters.options import AdapterName, AdapterOptions
from models.architecture.lookup import build_layers
from models.further.table import TRAINED
from models.heads.sequence_classification import SEQUENCE_CLASSIFICATION
from models.weights.edits import edit_weights
from models.weights.further import FurtherLayers
from models.weights.resized_vocab import ResizedVocabulary
from models.weights.sources import _follow_run, open_weights
from models.weights.vocabulary import resize_config
from scripts.generate import load_model

BOUND = 1e-5


def save_adapter(folder: Path, model_folder: Path, **options: Any) -> Path:
    """A peft folder with random matrices, as peft writes it."""
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    config = LoraConfig(**{"r": 4, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False, **options})
    torch.manual_seed(1)
    adapted = get_peft_model(model, config)
    for name, parameter in adapted.named_parameters():
        if "modules_to_save" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    adapted.save_pretrained(folder)
    return folder


def merge_with_peft(folder: Path, model_folder: Path) -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    return PeftModel.from_pretrained(model, folder).merge_and_unload().state_dict()


def assert_merged(adapter: Path, model_folder: Path, output: Path, bound: float = BOUND) -> None:
    ours = AutoModelForCausalLM.from_pretrained(export(adapter, output)).state_dict()
    theirs = merge_with_peft(adapter, model_folder)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert (ours[name] - tensor).abs().max() <= bound * tensor.abs().max(), name


@pytest.mark.parametrize(
    "options",
    [
        {"alpha_pattern": {"self_attn.q_proj": 64}, "rank_pattern": {"mlp.down_proj": 2}},
        {"alpha_pattern": {"layers.1.self_attn.q_proj": 64, "^model.layers.2.mlp.down_proj": 1}},
        {"alpha_pattern": {r"model.layers.(0|3)\..*": 64}, "rank_pattern": {"layers.[12].mlp.down_proj": 2}},
        {
            "target_modules": ["q_proj"],
            "target_parameters": ["mlp.down_proj.weight", "mlp.up_proj.weight"],
            "alpha_pattern": {"mlp.down_proj.weight": 64, "up_proj": 64},
            "rank_pattern": {"down_proj.weight": 2},
        },
    ],
    ids=["a part", "a layer", "an expression", "a weight"],
)
def test_patterns_match_the_names_of_the_whole_model(options: dict[str, Any], tmp_path: Path) -> None:
    save_llama(tmp_path / "hf")
    assert_merged(save_adapter(tmp_path / "adapter", tmp_path / "hf", **options), tmp_path / "hf", tmp_path / "merged")


@pytest.mark.parametrize("saved", [["lm_head"], ["embed_tokens", "lm_head"]])
def test_a_head_that_was_trained_apart_from_its_embedding_is_merged(saved: list[str], tmp_path: Path) -> None:
    save_llama(tmp_path / "hf", tied=True)
    adapter = save_adapter(tmp_path / "adapter", tmp_path / "hf", modules_to_save=saved)
    ours = AutoModelForCausalLM.from_pretrained(export(adapter, tmp_path / "merged"))
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "hf"), adapter).eval()
    input_ids = torch.arange(3, 23)[None]
    with torch.no_grad():
        found, expected = ours(input_ids).logits, theirs(input_ids).logits
    assert (found - expected).abs().max() < BOUND * expected.abs().max()
    options = AdapterOptions(name=AdapterName.lora, name_or_path=str(adapter))
    layers = build_layers(open_weights(str(tmp_path / "hf")).config)
    with pytest.raises(UserError, match="has trained a head apart from the embedding"):
        build_adapter(options, layers, seed=0, base_name="model")


def test_a_head_that_was_trained_apart_stays_so_with_more_rows(tmp_path: Path) -> None:
    save_llama(tmp_path / "hf", tied=True)
    adapter = save_adapter(tmp_path / "adapter", tmp_path / "hf", modules_to_save=["lm_head"])
    merged = open_weights(str(adapter))
    config = resize_config(merged, merged.config.vocab_size + 3)
    resized = edit_weights(merged, [ResizedVocabulary(config)])
    heads = [source.read_layer(len(layers) - 1, layers[-1]) for source in (merged, resized)
             for layers in [build_layers(source.config)]]  # fmt: skip
    (before, after) = (head["weight"] for head in heads)
    assert not config.tie_word_embeddings and torch.equal(after[:-3], before)


def test_a_merged_adapter_ends_where_its_run_did(tmp_path: Path) -> None:
    save_llama(tmp_path / "hf")
    save_tokenizer(tmp_path / "hf")
    adapter = save_adapter(tmp_path / "adapter", tmp_path / "hf")
    config = json.loads((tmp_path / "hf/config.json").read_text()) | {"eos_token_id": [2, 1]}
    (adapter / "config.json").write_text(json.dumps(config))
    assert json.loads((export(adapter, tmp_path / "merged") / "config.json").read_text())["eos_token_id"] == [2, 1]


def test_a_merged_classifier_has_the_labels_of_its_run(tmp_path: Path) -> None:
    save_llama(tmp_path / "hf")
    fields = json.loads((tmp_path / "hf/config.json").read_text()) | {
        "architectures": ["LlamaForSequenceClassification"], "pad_token_id": None,
        "id2label": {str(number): f"LABEL_{number}" for number in range(3)},
        "label2id": {f"LABEL_{number}": number for number in range(3)},
    }  # fmt: skip
    model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model(**fields))
    model.save_pretrained(tmp_path / "classifier")
    save_tokenizer(tmp_path / "classifier")
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], task_type="SEQ_CLS"))
    adapted.peft_config["default"].base_model_name_or_path = str(tmp_path / "classifier")
    adapted.save_pretrained(tmp_path / "adapter")
    named = json.loads((tmp_path / "classifier/config.json").read_text()) | {
        "id2label": {"0": "a", "1": "b", "2": "c"}, "label2id": {"a": 0, "b": 1, "c": 2}, "pad_token_id": 0,
        "problem_type": "single_label_classification",
    }  # fmt: skip
    (tmp_path / "adapter/config.json").write_text(json.dumps(named))
    merged = json.loads((export(tmp_path / "adapter", tmp_path / "merged") / "config.json").read_text())
    for name in ("id2label", "label2id", "pad_token_id", "problem_type"):
        assert merged[name] == named[name], name


@pytest.mark.parametrize("use_dora", [False, True], ids=["lora", "dora"])
def test_an_adapter_is_merged_before_it_is_rounded(use_dora: bool, tmp_path: Path) -> None:
    """The merged weights are those of an fp32 base, rounded once."""
    model = save_llama(tmp_path / "fp32").bfloat16()
    model.save_pretrained(tmp_path / "hf")
    model.float().save_pretrained(tmp_path / "fp32")
    adapter = save_adapter(tmp_path / "adapter", tmp_path / "fp32", use_dora=use_dora, lora_alpha=1)
    expected = merge_with_peft(adapter, tmp_path / "fp32")
    fields = json.loads((adapter / "adapter_config.json").read_text())
    fields["base_model_name_or_path"] = str(tmp_path / "hf")
    (adapter / "adapter_config.json").write_text(json.dumps(fields))
    for name, tensor in load_file(export(adapter, tmp_path / "merged") / "model.safetensors").items():
        assert tensor.dtype == torch.bfloat16
        assert (tensor.float() - expected[name]).abs().max() <= 2.0**-8 * expected[name].abs().max(), name
        same = (tensor == expected[name].bfloat16()).float().mean()
        assert same > 0.999, name  # a few sums lie next to the middle of two numbers


@pytest.mark.parametrize("saved", [None, ["embed_tokens", "lm_head"]], ids=["projections", "whole modules"])
def test_a_merged_adapter_is_read_unrounded(saved: list[str] | None, tmp_path: Path) -> None:
    """So that an evaluation in fp32 has what peft adds to a base in bf16; what loads stored dtypes rounds it."""
    save_llama(tmp_path / "hf").bfloat16().save_pretrained(tmp_path / "hf")
    adapter = save_adapter(tmp_path / "adapter", tmp_path / "hf", modules_to_save=saved)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    expected = PeftModel.from_pretrained(base, adapter).merge_and_unload().state_dict()
    source = open_weights(str(adapter))
    for index, layer in enumerate(build_layers(source.config)):
        for name, tensor in source.read_layer(index, layer).items():
            wanted = expected[layer.hf_prefix + name]
            assert (tensor - wanted).abs().max() <= BOUND * wanted.abs().max(), layer.hf_prefix + name
        assert {tensor.dtype for tensor in source.describe_layer(index, layer).values()} <= {torch.bfloat16}
    assert {parameter.dtype for parameter in load_model(source).parameters()} == {torch.bfloat16}


def test_experts_are_merged_before_they_are_rounded(tmp_path: Path) -> None:
    folder = save_family(tmp_path / "fp32", "deepseek_v3")
    AutoModelForCausalLM.from_pretrained(folder).bfloat16().save_pretrained(tmp_path / "hf")
    AutoModelForCausalLM.from_pretrained(tmp_path / "hf").float().save_pretrained(folder)
    make_adapter(tmp_path / "adapter", folder)
    wide = load_file(export(tmp_path / "adapter", tmp_path / "wide") / "model.safetensors")
    fields = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    fields["base_model_name_or_path"] = str(tmp_path / "hf")
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps(fields))
    merged = load_file(export(tmp_path / "adapter", tmp_path / "merged") / "model.safetensors")
    for name, tensor in merged.items():
        assert (tensor.to(torch.bfloat16) == wide[name].bfloat16()).float().mean() > 0.999, name


def test_merged_experts_are_read_unrounded(tmp_path: Path) -> None:
    """As dense layers are: a run in fp32 has what the adapter adds to a base in bf16."""
    folder = save_family(tmp_path / "fp32", "qwen3_moe")
    AutoModelForCausalLM.from_pretrained(folder).bfloat16().save_pretrained(tmp_path / "hf")
    AutoModelForCausalLM.from_pretrained(tmp_path / "hf").float().save_pretrained(folder)
    make_adapter(tmp_path / "adapter", folder)
    wide = open_weights(str(tmp_path / "adapter"))
    fields = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    fields["base_model_name_or_path"] = str(tmp_path / "hf")
    shutil.copytree(tmp_path / "adapter", tmp_path / "on_bf16")
    (tmp_path / "on_bf16/adapter_config.json").write_text(json.dumps(fields))
    source = open_weights(str(tmp_path / "on_bf16"))
    for index, layer in enumerate(build_layers(source.config)):
        expected = wide.read_layer(index, layer)
        for name, tensor in source.read_layer(index, layer).items():
            assert torch.equal(tensor.float(), expected[name]), layer.hf_prefix + name
        assert {tensor.dtype for tensor in source.describe_layer(index, layer).values()} <= {torch.bfloat16}


def test_a_classifier_with_new_rows_keeps_its_trained_head(tmp_path: Path) -> None:
    """Its base is tied, and has neither the head nor the rows."""
    save_llama(tmp_path / "hf", tied=True)
    save_tokenizer(tmp_path / "hf")
    adapted = make_adapter(tmp_path / "adapter", tmp_path / "hf", ["q_proj"], SEQUENCE_CLASSIFICATION, num_labels=3)
    config = adapted.config.to_dict() | {"architectures": ["LlamaForSequenceClassification"], "vocab_size": 330}
    (tmp_path / "adapter/config.json").write_text(json.dumps(config))
    merged = AutoModelForSequenceClassification.from_pretrained(export(tmp_path / "adapter", tmp_path / "merged"))
    assert torch.equal(merged.score.weight, adapted.base_model.model.score.modules_to_save["default"].weight)
    assert merged.get_input_embeddings().weight.shape[0] == 330
    convert(tmp_path / "adapter", tmp_path / "pipeline", verify=True)


def test_further_layers_are_made_only_of_a_base_that_has_not_trained_them() -> None:
    """A run with mtp.loss_coef may begin with the published model, or with what such a run has left."""
    published = build_family_config("deepseek_v3")
    trained = copy.deepcopy(published)
    setattr(trained, TRAINED, 1)
    for config, made in ((published, [FurtherLayers]), (trained, [])):
        base: Any = SimpleNamespace(config=copy.deepcopy(config))
        assert [type(edit) for edit in _follow_run(base, trained)] == made


def test_a_peft_folder_brings_its_own_tokenizer(tmp_path: Path) -> None:
    """And chat template, as another trainer saves it."""
    save_llama(tmp_path / "hf")
    save_tokenizer(tmp_path / "hf")
    (tmp_path / "hf/chat_template.jinja").write_text("base")
    (tmp_path / "hf/preprocessor_config.json").write_text("{}")
    adapter = save_adapter(tmp_path / "adapter", tmp_path / "hf")
    assert open_weights(str(adapter)).path == tmp_path / "hf"
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    tokenizer.chat_template = {"default": "adapter's", "tool_use": "tools"}
    tokenizer.save_pretrained(adapter)
    assert open_weights(str(adapter)).path == adapter
    merged = export(adapter, tmp_path / "merged")
    assert AutoTokenizer.from_pretrained(merged).chat_template == tokenizer.chat_template
    assert (merged / "preprocessor_config.json").is_file()
    shutil.rmtree(tmp_path / "hf")


@pytest.mark.parametrize(
    ("field", "value"),
    [("lora_bias", True), ("alora_invocation_tokens", [1]), ("layer_replication", [[0, 2]]), ("bias", "all")],
)
def test_what_peft_would_compute_otherwise_is_refused(field: str, value: Any, tmp_path: Path) -> None:
    save_llama(tmp_path / "hf")
    adapter = save_adapter(tmp_path / "adapter", tmp_path / "hf")
    fields = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(fields | {field: value}))
    with pytest.raises(UserError, match=f"has {field}=.*, which is not supported; merge the adapter with peft first"):
        open_weights(str(adapter))
