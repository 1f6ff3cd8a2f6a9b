"""Frozen weights as the files hold them: their values are, bit by bit, those of dequantizing on reading."""

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
from models.adapters.quantized import list_held
from models.architecture.lookup import build_layers
from models.layers.frozen import FrozenLinear, count_stack_bytes
from models.layers.layer import Layer
from models.weights.edits import Edit, EditedWeights
from models.weights.published import read_kept
from models.weights.source import WeightSource
from models.weights.sources import open_weights
from training.costs.cost import MicroBatchShape, count_layers

NAMES = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
LAST = 4  # of the decoder layers
SAVES: dict[str, Callable[..., Tensors]] = {"fp8": save_fp8, "mxfp4": save_mxfp4, "int4": save_int4}


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
    stacks = read_kept(source, layer, NAMES, torch.bfloat16)
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
    for stack in read_kept(source, layer, NAMES, torch.bfloat16).values():
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
        read_kept(source, layer, NAMES, torch.bfloat16)


def test_blocks_that_are_cut_are_refused(tmp_path: Path) -> None:
    stored = save_fp8(tmp_path)
    for name in [name for name in stored if name.endswith("_scale_inv")]:
        rows, columns = stored[name.removesuffix("_scale_inv")].shape
        stored[name] = torch.ones(-(-rows // 16), -(-columns // BLOCK[1]))
    save_file(stored, tmp_path / "model.safetensors")
    write_config(tmp_path, quantization_config=FP8 | {"weight_block_size": [16, BLOCK[1]]})
    layer, source = open_layer(tmp_path)
    with pytest.raises(
        UserError, match=r"_proj.weight' \[24, 48\] is not a whole number of blocks, and experts are kept in fp8 only"
    ):
        read_kept(source, layer, NAMES, torch.bfloat16)


def test_projections_in_fp8_are_kept_with_blocks_that_are_cut(tmp_path: Path) -> None:
    """Those that the files hold so, and no others; and each product has the bits of the dequantized one."""
    stored = save_fp8(tmp_path, block=(16, 8))
    other = "self_attn.o_proj.weight"
    stored[f"model.layers.3.{other}"] = stored.pop(f"model.layers.3.{other}").bfloat16()
    del stored[f"model.layers.3.{other}_scale_inv"]
    save_file(stored, tmp_path / "model.safetensors")
    layer, source = open_layer(tmp_path)
    names = [name for name in list_held(layer.build_on_meta(), "fp8") if name not in NAMES]
    kept, whole = read_kept(source, layer, names, torch.bfloat16), source.read_layer(LAST, layer)
    assert kept.keys() == set(names) - {other} and len(kept) > 6
    for name, stack in kept.items():
        bias = torch.nn.Parameter(torch.randn(len(whole[name]), dtype=torch.bfloat16))
        projection = FrozenLinear(stack, bias)
        assert torch.equal(projection.weight, whole[name]) and len(list(projection.parameters())) == 1
        rows = torch.randn(2, 3, whole[name].shape[1], dtype=torch.bfloat16, requires_grad=True)
        expected = torch.nn.functional.linear(rows, whole[name], bias)
        found, gradient = projection(rows), torch.randn_like(expected)
        assert torch.equal(found, expected)
        (ours,), (theirs,) = (torch.autograd.grad(each, rows, gradient) for each in (found, expected))
        assert torch.equal(ours, theirs)


def test_experts_that_are_not_stacks_of_the_layer_are_refused(tmp_path: Path) -> None:
    stored = save_mxfp4(tmp_path)
    name = "model.layers.3.mlp.experts.down_proj"
    for part in ("_blocks", "_scales"):
        stored[name + part] = stored[name + part][:, :-8].clone()
    save_file(stored, tmp_path / "model.safetensors")
    layer, source = open_layer(tmp_path)
    with pytest.raises(UserError, match=rf"'{name}' has shape \[8, 96, 56\]"):
        read_kept(source, layer, NAMES, torch.bfloat16)


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
    assert adapter.list_quantized(mixture)[0] == f"{mixture[1].hf_prefix} in fp8"
    with pytest.raises(UserError, match="adapter.keep_quantized=true: model holds no weights in fp8, mxfp4 or int4"):
        build_adapter(options, mixture, seed=3, base_name="model")
    assert build_adapter(options, dense, seed=3, base_name="model", form="fp8") is not None
    with pytest.raises(UserError, match="true: in mxfp4 it keeps the experts .* this model has no stacks of experts"):
        build_adapter(options, dense, seed=3, base_name="model", form="mxfp4")
    from_base = replace(options, init_lora_weights="pissa")
    with pytest.raises(UserError, match="init_lora_weights=pissa is not tested with adapter.keep_quantized=true"):
        build_adapter(from_base, mixture, seed=3, base_name="model", form="fp8")


@pytest.mark.parametrize("form", SAVES)
def test_the_plan_counts_the_bytes_of_blocks_of_the_published_size(form: str, tmp_path: Path) -> None:
    """Projections too, whose blocks are cut at the edge."""
    block = {"block": (128, 128)} if form == "fp8" else {}
    SAVES[form](tmp_path, **block, **({} if form == "mxfp4" else {"hidden_size": 256, "moe_intermediate_size": 128}))
    layer, source = open_layer(tmp_path)
    for stack in read_kept(source, layer, list_held(layer.build_on_meta(), form), torch.bfloat16).values():
        assert stack.nbytes == count_stack_bytes(form, stack.shape)


def test_the_plan_counts_projections_in_bf16_that_the_folder_does_not_have_in_fp8(tmp_path: Path) -> None:
    """As its config.json says, which a plan has without the files."""
    stored = save_fp8(tmp_path, block=(128, 128), hidden_size=256, moe_intermediate_size=128)
    name = f"model.layers.{LAST - 2}.self_attn.o_proj"
    stored[f"{name}.weight"] = stored[f"{name}.weight"].bfloat16()
    del stored[f"{name}.weight_scale_inv"]
    save_file(stored, tmp_path / "model.safetensors")
    quantization = FP8 | {"weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head", name]}
    write_config(tmp_path, quantization_config=quantization)
    source = open_weights(str(tmp_path))
    layers = build_layers(source.config)
    options = AdapterOptions(name=AdapterName.lora, keep_quantized=True)
    adapter = build_adapter(
        options, layers, seed=3, base_name="model", form=source.form, unconverted=source.unconverted
    )
    costs = count_layers(layers, source.config, MicroBatchShape(1, 8, torch.bfloat16), adapter=adapter)
    found = []
    for index in (LAST - 1, LAST):
        layer = layers[index]
        kept = read_kept(source, layer, list_held(layer.build_on_meta(), "fp8"), torch.bfloat16)
        found.append(sum(stack.nbytes for stack in kept.values()))
        assert costs[index].parameters.quantized_bytes == found[-1]
    assert found[0] < found[1]
