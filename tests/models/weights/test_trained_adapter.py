"""The adapter that a run has saved, when the run is resumed; and peft folders that cannot be opened."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig
from safetensors.torch import save_file
from support.adapters import build_lora
from support.families import build_family, build_family_config

from errors import UserError
from models.adapters.peft_export import save_adapter_config
from models.architecture.lookup import build_layers
from models.weights.sources import open_weights
from models.weights.trained_adapter import check_same_adapter

LLAMA = build_layers(build_family("llama").config)
DEEPSEEK = build_layers(build_family_config("deepseek_v3"))  # one dense layer, three of experts
STACKS = "mlp.experts.down_proj,mlp.experts.gate_up_proj"


def test_a_run_resumes_with_the_same_adapter_only(tmp_path: Path) -> None:
    adapter = build_lora(LLAMA, r=4)
    step = tmp_path / "global_step1"
    with pytest.raises(UserError, match="was saved with adapter=none, this run has adapter=lora"):
        check_same_adapter(adapter, step)
    save_adapter_config(adapter, tmp_path, build_family("llama").config)
    check_same_adapter(adapter, step)
    with pytest.raises(UserError, match="was saved with adapter=lora, this run has adapter=none"):
        check_same_adapter(None, step)
    options: dict[str, Any]
    for options, expected in (
        ({"r": 8}, "adapter.r was 4, is 8"),
        ({"r": 4, "target_modules": ["q_proj"]}, r"was \[down_proj,.*is \[q_proj\]"),
    ):
        with pytest.raises(UserError, match=expected):
            check_same_adapter(build_lora(LLAMA, **options), step)


@pytest.mark.parametrize("pattern", ["rank_pattern", "alpha_pattern"])
def test_an_adapters_own_ranks_and_scales_are_kept(tmp_path: Path, pattern: str) -> None:
    """Those of the folder that the run began with, which no key gives."""
    adapter, step = build_lora(LLAMA, r=4), tmp_path / "global_step1"
    setattr(adapter.config, pattern, {"q_proj": 8})
    save_adapter_config(adapter, tmp_path, build_family("llama").config)
    check_same_adapter(adapter, step)
    with pytest.raises(UserError, match=rf"resume: adapter.{pattern} was {{'q_proj': 8}}, is {{}}; .*name_or_path"):
        check_same_adapter(build_lora(LLAMA, r=4), step)


@pytest.mark.parametrize("options", [{}, {"use_rslora": True}])
def test_a_run_that_starts_from_the_base_is_compared_by_the_values_it_was_given(
    options: dict[str, Any], tmp_path: Path
) -> None:
    """Its files have twice the rank."""
    given: dict[str, Any] = {"r": 4, "lora_alpha": 7, "init_lora_weights": "pissa", **options}
    step = tmp_path / "global_step1"
    save_adapter_config(build_lora(LLAMA, **given), tmp_path, build_family("llama").config)
    check_same_adapter(build_lora(LLAMA, **given), step, "pissa")
    for change, expected in (
        ({"r": 6}, "adapter.r was 4, is 6"),
        ({"lora_alpha": 9}, "adapter.lora_alpha was 7, is 9"),
        ({"init_lora_weights": "olora"}, "adapter.init_lora_weights was pissa, is olora"),
        ({"r": 8, "init_lora_weights": True}, "adapter.init_lora_weights was pissa, is true"),
    ):
        with pytest.raises(UserError, match=expected):
            check_same_adapter(build_lora(LLAMA, **given | change), step, "pissa")
    save_adapter_config(build_lora(LLAMA, r=8), tmp_path, build_family("llama").config)
    with pytest.raises(UserError, match="adapter.init_lora_weights was true, is pissa"):
        check_same_adapter(build_lora(LLAMA, **given), step)


def test_an_adapter_on_experts_compares_equal_after_renaming_for_peft(tmp_path: Path) -> None:
    adapter, step = build_lora(DEEPSEEK), tmp_path / "global_step1"
    save_adapter_config(adapter, tmp_path, build_family_config("deepseek_v3"))
    assert "gate_proj" not in json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"]
    check_same_adapter(adapter, step)
    expected = rf"resume: adapter.target_parameters was \[{STACKS}\], is \[\]; give the same"
    with pytest.raises(UserError, match=expected):
        check_same_adapter(build_lora(DEEPSEEK, target_parameters=[]), step)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"peft_type": "IA3"}, "describes IA3; only LoRA adapters are supported"),
        (
            {"trainable_token_indices": [3]},
            "has trainable_token_indices=[3], which is not supported; merge the adapter",
        ),
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


def test_a_run_of_version_1_1_with_the_head_of_a_tied_model_continues_without_it(tmp_path: Path) -> None:
    """That version omitted a tied head from `modules_to_save`, and so from what was trained."""
    config = build_family_config("llama", tied=True)
    tied = build_layers(config)
    save_adapter_config(build_lora(tied), tmp_path, config)
    with pytest.raises(UserError, match=r", or adapter.modules_to_save=\[\] to continue a run of version 1.1"):
        build_lora(tied, modules_to_save=["lm_head"])
    check_same_adapter(build_lora(tied, modules_to_save=[]), tmp_path / "global_step1")
