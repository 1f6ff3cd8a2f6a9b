"""Stacks of experts as the files hold them: their values are, bit by bit, those of dequantizing on reading."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.families import build_family_config
from support.model_folders import Tensors
from support.quantized import BLOCK, FP8, save_fp8, save_int4, save_mxfp4, write_config

from errors import UserError
from models.adapters.build import build_adapter
from models.adapters.options import AdapterName, AdapterOptions
from models.architecture.lookup import build_layers
from models.layers.layer import Layer
from models.weights.edits import Edit, EditedWeights
from models.weights.published import read_stacks
from models.weights.source import WeightSource
from models.weights.sources import open_weights

NAMES = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
LAST = 4  # of the decoder layers
SAVES = {"fp8": save_fp8, "mxfp4": save_mxfp4, "int4": save_int4}


def open_layer(folder: Path) -> tuple[Layer, WeightSource]:
    source = open_weights(str(folder))
    return build_layers(source.config)[LAST], source


@pytest.mark.parametrize("experts", [range(8), range(2, 6)], ids=str)
@pytest.mark.parametrize("form", SAVES)
def test_the_values_are_those_that_are_read(form: str, experts: range, tmp_path: Path) -> None:
    SAVES[form](tmp_path)
    source = open_weights(str(tmp_path))
    layer = replace(build_layers(source.config)[LAST], experts=dict.fromkeys(NAMES, experts))
    whole = source.read_layer(LAST, layer)
    stacks = read_stacks(source, layer, NAMES, torch.bfloat16)
    for name in NAMES:
        stack, expected = stacks[name], whole[name][experts.start : experts.stop]
        assert stack.shape == expected.shape and stack.form == form
        assert torch.equal(stack.dequantize(slice(None)), expected)
        assert torch.equal(stack.dequantize(slice(1, 3)), expected[1:3])
    others = source.read_layer(LAST, replace(layer, kept=frozenset(NAMES)))
    assert whole.keys() - others.keys() == set(NAMES)
    assert all(torch.equal(tensor, whole[name]) for name, tensor in others.items())


@pytest.mark.parametrize(("form", "share"), [("fp8", 1 + 4 / 64), ("mxfp4", 1 / 2 + 1 / 32), ("int4", 1 / 2 + 2 / 32)])
def test_the_bytes(form: str, share: float, tmp_path: Path) -> None:
    """A block in fp8 has 64 numbers here."""
    SAVES[form](tmp_path)
    source = open_weights(str(tmp_path))
    layer = build_layers(source.config)[LAST]
    for stack in read_stacks(source, layer, NAMES, torch.bfloat16).values():
        assert stack.nbytes == share * stack.shape.numel()


def remove_scales(stored: Tensors, name: str) -> None:
    stored[name] = stored[name].bfloat16()
    del stored[f"{name}_scale_inv"]


def forget_scales(stored: Tensors, name: str) -> None:
    del stored[f"{name}_scale_inv"]


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (remove_scales, "up_proj.weight' is not in fp8, so that adapter.keep_quantized=true cannot keep it"),
        (forget_scales, "up_proj.weight_scale_inv', the scales of an fp8 tensor, is missing"),
    ],
)
def test_an_expert_that_is_not_as_published_is_named(
    damage: Callable[[Tensors, str], None], expected: str, tmp_path: Path
) -> None:
    stored = save_fp8(tmp_path)
    damage(stored, "model.layers.3.mlp.experts.1.up_proj.weight")
    save_file(stored, tmp_path / "model.safetensors")
    layer, source = open_layer(tmp_path)
    with pytest.raises(UserError, match=expected):
        read_stacks(source, layer, NAMES, torch.bfloat16)


def test_blocks_that_are_cut_are_refused(tmp_path: Path) -> None:
    stored = save_fp8(tmp_path)
    for name in [name for name in stored if name.endswith("_scale_inv")]:
        rows, columns = stored[name.removesuffix("_scale_inv")].shape
        stored[name] = torch.ones(-(-rows // 16), -(-columns // BLOCK[1]))
    save_file(stored, tmp_path / "model.safetensors")
    write_config(tmp_path, quantization_config=FP8 | {"weight_block_size": [16, BLOCK[1]]})
    layer, source = open_layer(tmp_path)
    with pytest.raises(
        UserError, match=r"\[24, 48\]\) is not a whole number of blocks of \[16, 8\], and is kept in fp8"
    ):
        read_stacks(source, layer, NAMES, torch.bfloat16)


def test_experts_that_are_not_stacks_of_the_layer_are_refused(tmp_path: Path) -> None:
    stored = save_mxfp4(tmp_path)
    name = "model.layers.3.mlp.experts.down_proj"
    for part in ("_blocks", "_scales"):
        stored[name + part] = stored[name + part][:, :-8].clone()
    save_file(stored, tmp_path / "model.safetensors")
    layer, source = open_layer(tmp_path)
    with pytest.raises(UserError, match=rf"'{name}' has shape \[8, 96, 56\]"):
        read_stacks(source, layer, NAMES, torch.bfloat16)


def test_an_edit_that_changes_experts_leaves_no_form(tmp_path: Path) -> None:
    save_fp8(tmp_path)
    source = open_weights(str(tmp_path))
    assert (source.form, EditedWeights(source, Edit()).form) == ("fp8", "fp8")

    class Merged(Edit):
        changes_experts = True

    assert EditedWeights(source, Merged()).form == ""


def test_options() -> None:
    mixture, dense = (build_layers(build_family_config(name)) for name in ("deepseek_v3", "llama"))
    options = AdapterOptions(name=AdapterName.lora, keep_quantized=True)
    adapter = build_adapter(options, mixture, seed=3, base_name="model", form="fp8")
    assert adapter is not None and (adapter.form, adapter.in_4bit) == ("fp8", False)
    assert not adapter.list_quantized(mixture)  # it computes what a run does that dequantizes them on reading
    with pytest.raises(UserError, match="adapter.keep_quantized=true: model holds no weights in fp8, mxfp4 or int4"):
        build_adapter(options, mixture, seed=3, base_name="model")
    with pytest.raises(UserError, match="keep_quantized=true: it keeps the experts .* this model has no stacks of exp"):
        build_adapter(options, dense, seed=3, base_name="model", form="fp8")
    from_base = replace(options, init_lora_weights="pissa")
    with pytest.raises(UserError, match="init_lora_weights=pissa is not tested with adapter.keep_quantized=true"):
        build_adapter(from_base, mixture, seed=3, base_name="model", form="fp8")
