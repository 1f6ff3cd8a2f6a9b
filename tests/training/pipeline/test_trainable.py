"""What is trained: adapters and frozen weights that a config describes wrongly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from peft import LoraConfig
from safetensors.torch import save_file
from support.configs import build_config
from support.families import build_family, build_family_config

from errors import UserError
from models.adapters.targets import build_lora_config, describe_targets
from models.architecture.lookup import build_layers
from models.weights.sources import open_weights
from training.pipeline.trainable import (
    build_adapter,
    check_freeze,
    check_peft_names,
    check_same_adapter,
    save_adapter_config,
)

LLAMA, GPT2 = (build_layers(build_family(name).config) for name in ("llama", "gpt2"))
DEEPSEEK = build_layers(build_family_config("deepseek_v3"))  # one dense layer, three of experts
STACKS = "mlp.experts.down_proj,mlp.experts.gate_up_proj"


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
        (
            (),
            "rank 16 on 32 projections and 6 stacks of routed experts; "
            f"none on 3 routers (adapter.target_parameters=[{STACKS},mlp.gate.weight] includes them)",
        ),
        (
            ("adapter.target_modules=[gate_proj,up_proj,down_proj]",),
            "rank 16 on 12 projections; none on 20 projections, "
            f"6 stacks of routed experts (adapter.target_parameters=[{STACKS}] includes them), 3 routers (",
        ),
        (
            ("adapter.target_modules=[]", "adapter.target_parameters=[experts.down_proj,gate.weight]"),
            "rank 16 on 3 stacks of routed experts and 3 routers; none on 32 projections, 3 stacks of routed experts (",
        ),
        (("adapter.target_parameters=[]",), "rank 16 on 32 projections; none on 6 stacks of routed experts ("),
    ],
)
def test_what_of_a_mixture_has_adapters_and_what_has_none(overrides: tuple[str, ...], expected: str) -> None:
    adapter = build_adapter(build_config("adapter=lora", *overrides), DEEPSEEK)
    described = describe_targets(DEEPSEEK, adapter.config)
    assert described.startswith(expected) and "\n" not in described


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ("adapter.target_parameters=[mlp.experts.w1]",),
            "no parameter of experts or of a router is named 'mlp.experts.w1'; there are mlp.experts.down_proj, "
            "mlp.experts.gate_up_proj, mlp.gate.weight. Projections are named by adapter.target_modules",
        ),
        (
            ("adapter.target_modules=[gate_up_proj]",),
            "experts are named by adapter.target_parameters: mlp",
        ),
        (("adapter.target_modules=[]",), "name nothing"),
        (
            ("adapter.lora_dropout=0.1",),
            "adapter.lora_dropout=0.1 cannot be used on stacked parameters such as "
            "'model.layers.1.mlp.experts.gate_up_proj'",
        ),
        (("adapter.use_dora=true",), "adapter.target_parameters=[] to leave the experts without adapters"),
        (
            ("adapter.load_in_4bit=true", "adapter.target_parameters=[]"),
            "the experts of a layer are one tensor, 'model.layers.1.mlp.experts.gate_up_proj'",
        ),
    ],
)
def test_an_adapter_of_experts_that_cannot_be(overrides: tuple[str, ...], expected: str) -> None:
    with pytest.raises(UserError) as caught:
        build_adapter(build_config("adapter=lora", *overrides), DEEPSEEK)
    assert expected in str(caught.value) and "\n" not in str(caught.value)


def test_a_dense_model_has_no_parameters_of_experts() -> None:
    with pytest.raises(UserError, match="is named 'experts.down_proj'; this model has no experts"):
        build_adapter(build_config("adapter=lora", "adapter.target_parameters=[experts.down_proj]"), LLAMA)


def test_names_that_peft_gives_to_the_experts_cannot_have_dora() -> None:
    config = build_config("adapter=lora", "adapter.target_parameters=[]", "adapter.use_dora=true")
    adapter = build_adapter(config, DEEPSEEK)
    with pytest.raises(UserError, match="of a 'deepseek_v3' peft takes 'down_proj' for the experts'"):
        check_peft_names(adapter, build_family_config("deepseek_v3"))
    check_peft_names(build_adapter(config, LLAMA), build_family_config("llama"))


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
    save_adapter_config(adapter, tmp_path, build_family("llama").config)
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


def test_an_adapter_of_experts_is_the_same_after_it_was_named_for_peft(tmp_path: Path) -> None:
    config, step = build_config("adapter=lora"), tmp_path / "global_step1"
    adapter = build_adapter(config, DEEPSEEK)
    save_adapter_config(adapter, tmp_path, build_family_config("deepseek_v3"))
    assert "gate_proj" not in json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"]
    check_same_adapter(config, adapter, step)
    other = build_config("adapter=lora", "adapter.target_parameters=[]")
    expected = rf"resume: adapter.target_parameters was \[{STACKS}\], is \[\]; give the same"
    with pytest.raises(UserError, match=expected):
        check_same_adapter(other, build_adapter(other, DEEPSEEK), step)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"peft_type": "IA3"}, "describes IA3; only LoRA"),
        ({"trainable_token_indices": [3]}, "has trainable_token_indices=[3]; adapters of all layers alike"),
        ({"base_model_name_or_path": None}, "has no base_model_name_or_path"),
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


def test_modules_to_save_are_around_the_decoder_layers() -> None:
    chosen = build_config("adapter=lora", "adapter.modules_to_save=[embed_tokens,lm_head]")
    assert build_adapter(chosen, LLAMA).config.modules_to_save == ["embed_tokens", "lm_head"]
    assert build_adapter(build_config("adapter=lora"), LLAMA).config.modules_to_save is None
    wrong = build_config("adapter=lora", "adapter.modules_to_save=[q_proj]")
    with pytest.raises(UserError, match="no module around the decoder layers is named 'q_proj'; there are embed_tok"):
        build_adapter(wrong, LLAMA)


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
