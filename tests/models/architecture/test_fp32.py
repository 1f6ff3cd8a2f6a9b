"""Tensors that `transformers` keeps in fp32 in a model of 16 bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.chain import Chain, difference, positions, tokens
from support.families import HYBRIDS, MIXTURES, build_family, build_family_config, save_family
from support.model_folders import convert, export, load_transformers
from transformers import AutoModelForCausalLM

from models.architecture.lookup import build_layers

MIXTURE = "ernie4_5_moe"  # its gates stay in fp32 in each release
GATE = "gate.weight"
REFUSED = ("zamba", "zamba2", "zaya", "xlstm")


def list_fp32(model_type: str, dtype: torch.dtype = torch.bfloat16) -> set[str]:
    layers = build_layers(build_family_config(model_type))
    return {layer.hf_prefix + name for layer in layers for name in layer.list_fp32(dtype)}


def list_trained(model_type: str) -> set[str]:
    layers = [layer for layer in build_layers(build_family_config(model_type)) if layer.owns_weights]
    return {layer.hf_prefix + name for layer in layers for name, _ in layer.build_on_meta().named_parameters()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("model_type", [MIXTURE, "deepseek_v3", "mixtral", "llama", "gpt_oss"])
def test_it_is_what_transformers_keeps(model_type: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(save_family(tmp_path, model_type), dtype=dtype)
    kept = {name for name, each in model.named_parameters() if each.dtype is torch.float32}
    assert list_fp32(model_type, dtype) == kept & list_trained(model_type)


@pytest.mark.parametrize(
    ("model_type", "dtype"),
    [(MIXTURE, torch.bfloat16), ("deepseek_v3", torch.bfloat16), ("gpt_oss", torch.float16)]
    + [
        pytest.param(name, torch.bfloat16, marks=pytest.mark.full)
        for name in (*MIXTURES, *HYBRIDS)
        if name not in (MIXTURE, *REFUSED)
    ],
)
def test_layers_compute_with_it_what_transformers_does(model_type: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Up to the rounding of 16 bits: all of a model computes with parameters of two dtypes, forward and backward."""
    build_family(model_type).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype, attn_implementation="eager")
    chain = Chain(model)
    for layer, module in zip(chain.layers, chain.stages, strict=True):
        stays = layer.buffer_names() | layer.list_fp32(dtype)
        for name, each in module.state_dict(keep_vars=True).items():
            each.data = each.data.to(torch.float32 if name in stays else dtype)
    logits = chain(tokens(), positions())
    assert difference(logits.float(), model(tokens(), use_cache=False).logits.float()) < 0.1
    logits.float().square().mean().backward()
    assert all(gradient is None or gradient.isfinite().all() for gradient in chain.gradients().values())


def test_a_conversion_rounds_all_else(tmp_path: Path) -> None:
    gates = list_fp32(MIXTURE)
    assert gates and all(name.endswith(GATE) for name in gates)
    save_family(tmp_path / "hf", MIXTURE)
    convert(tmp_path / "hf", tmp_path / "bf16", dtype=torch.bfloat16)
    export(tmp_path / "bf16", tmp_path / "back")
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("hf", "back"))
    assert all(torch.equal(after[name], before[name]) for name in gates)
    loaded = load_transformers(tmp_path / "back")
    assert {name for name, each in loaded.items() if each.dtype is torch.float32} >= gates
    assert loaded["model.embed_tokens.weight"].dtype is torch.bfloat16
    export(tmp_path / "bf16", tmp_path / "fp32", dtype=torch.float32)
    assert {each.dtype for each in load_file(tmp_path / "fp32/model.safetensors").values()} == {torch.float32}
