"""What is trained: adapters and frozen weights that a config describes wrongly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from peft import LoraConfig
from safetensors.torch import save_file
from support.configs import build_config
from support.families import build_family

from errors import UserError
from models.adapters import build_lora_config
from models.architecture import build_layers
from models.weights.sources import open_weights
from training.pipeline.trainable import build_adapter, check_freeze, check_same_adapter, save_adapter_config

LLAMA, GPT2 = (build_layers(build_family(name).config) for name in ("llama", "gpt2"))


def test_all_linear_are_the_projections_of_the_decoder_layers() -> None:
    assert build_lora_config(LLAMA, "all-linear").target_modules == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    }  # fmt: skip
    config = build_lora_config(GPT2, "all-linear")
    assert config.target_modules == {"c_attn", "c_proj", "c_fc"} and config.fan_in_fan_out


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ("adapter.target_modules=[q_proj,wqkv]",),
            "no projection of the model is named 'wqkv'; there are down_proj, gate_proj, k_proj",
        ),
        (("adapter.target_modules=lm_head",), "named 'lm_head'"),
        (("adapter.r=0",), "adapter.r=0: at least 1"),
        (("adapter.lora_dropout=1",), "adapter.lora_dropout=1.0: from 0 to below 1"),
        (("adapter.name_or_path=nowhere",), "adapter.name_or_path=nowhere is not a peft folder (adapter_config.json"),
    ],
)
def test_an_adapter_that_cannot_be(overrides: tuple[str, ...], expected: str) -> None:
    with pytest.raises(UserError) as caught:
        build_adapter(build_config("adapter=lora", *overrides), LLAMA)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (('freeze=["layer5"]',), "freeze: 'layer5' matches no weight; they are named like 'lm_head.weight'"),
        (('freeze=["("]',), "freeze: '(' is not a valid regular expression"),
        (('freeze=["."]',), "leaves nothing to train"),
    ],
)
def test_weights_that_cannot_be_frozen(overrides: tuple[str, ...], expected: str) -> None:
    with pytest.raises(UserError) as caught:
        check_freeze(build_config(*overrides), LLAMA)
    assert expected in str(caught.value)


def test_adapter_and_full_checkpoint_are_not_mixed_up(tmp_path: Path) -> None:
    lora, full = build_config("adapter=lora", "adapter.r=4"), build_config()
    adapter = build_adapter(lora, LLAMA)
    step = tmp_path / "global_step1"
    with pytest.raises(UserError, match="was saved with adapter=none, this run has adapter=lora"):
        check_same_adapter(lora, adapter, step)
    save_adapter_config(adapter, tmp_path)
    check_same_adapter(lora, adapter, step)
    with pytest.raises(UserError, match="was saved with adapter=lora, this run has adapter=none"):
        check_same_adapter(full, None, step)
    for override, expected in (
        ("adapter.r=8", "adapter.r was 4, is 8"),
        ("adapter.target_modules=[q_proj]", r"was \[down_proj,.*is \[q_proj\]"),
    ):
        other = build_config("adapter=lora", "adapter.r=4", override)
        with pytest.raises(UserError, match=expected):
            check_same_adapter(other, build_adapter(other, LLAMA), step)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"peft_type": "IA3"}, "describes IA3; only plain LoRA"),
        ({"modules_to_save": ["lm_head"]}, "describes a LoRA with modules_to_save"),
        ({"base_model_name_or_path": None}, "names no base_model_name_or_path"),
        ({"base_model_name_or_path": "./nowhere"}, "its base model (base_model_name_or_path) cannot be opened"),
        ({}, "holds adapter_config.json but no adapter_model.safetensors"),
    ],
)
def test_an_adapter_folder_that_cannot_be_opened(fields: dict[str, object], expected: str, tmp_path: Path) -> None:
    LoraConfig(target_modules=["q_proj"], base_model_name_or_path="base").save_pretrained(str(tmp_path))
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))
    if fields:
        save_file({}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(UserError) as caught:
        open_weights(str(tmp_path))
    assert expected in str(caught.value) and "\n" not in str(caught.value)


def test_4_bits_want_their_package_and_plain_projections(monkeypatch: pytest.MonkeyPatch) -> None:
    config = build_config("adapter=lora", "adapter.load_in_4bit=true")
    assert build_adapter(config, LLAMA).in_4bit
    with pytest.raises(
        UserError,
        match=r"adapter.load_in_4bit=true: 'transformer.h.0.attn.c_attn' is a Conv1D, which cannot be quantized",
    ):
        build_adapter(config, GPT2)
    monkeypatch.setattr("training.pipeline.trainable.find_spec", lambda name: None)
    with pytest.raises(UserError, match="needs the package bitsandbytes"):
        build_adapter(config, LLAMA)
