"""Published weights that are quantized. The oracle is what `transformers` dequantizes, bit by bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.families import build_family, build_family_config
from support.model_folders import Tensors, assert_same_bits, convert, export, load_transformers
from transformers import AutoModelForCausalLM, FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from errors import UserError
from models.architecture import build_layers
from models.weights.quantized import dequantize_fp8, dequantize_mxfp4
from models.weights.sources import open_weights

BLOCK = (8, 8)  # divides every size of the small model: transformers refuses, or misreads, blocks that are cut
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(BLOCK)}
CODES = torch.arange(256, dtype=torch.uint8)
KEPT = ("embed_tokens", "lm_head", "mlp.gate.", "norm")  # what DeepSeek-V3 does not quantize


def quantize_fp8(weight: torch.Tensor, block: tuple[int, int] = BLOCK) -> tuple[torch.Tensor, torch.Tensor]:
    """weight [R, C] as (float8_e4m3fn, scales), blocks cut at the edge."""
    rows, columns = block
    parts = [part.float().abs().amax().item() for band in weight.split(rows) for part in band.split(columns, 1)]
    scales = torch.tensor(parts).view(-(-weight.shape[0] // rows), -1) / 448
    return (weight.float() / spread(scales, block, weight.shape)).to(torch.float8_e4m3fn), scales


def spread(scales: torch.Tensor, block: tuple[int, int], shape: torch.Size) -> torch.Tensor:
    return scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[: shape[0], : shape[1]]


def save_fp8(folder: Path, dtype: str = "bfloat16") -> Tensors:
    """A small DeepSeek-V3 as it is published; returns the stored tensors."""
    build_family("deepseek_v3").bfloat16().save_pretrained(folder)
    stored: Tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        stored[name] = tensor.float() if "e_score_correction_bias" in name else tensor
        if tensor.dim() == 2 and not any(part in name for part in KEPT):
            stored[name], stored[name + "_scale_inv"] = quantize_fp8(tensor)
    save_file(stored, folder / "model.safetensors")
    write_config(folder, quantization_config=FP8, dtype=dtype)
    return stored


def write_config(folder: Path, **fields: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def load_dequantized(folder: Path, quantization: Any) -> Tensors:
    """The oracle."""
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=quantization).state_dict()


def read_layers(folder: Path) -> Tensors:
    """What a rank loads, of all layers."""
    source = open_weights(str(folder))
    layers = build_layers(source.config)
    source.check_complete(layers)
    return {
        layer.hf_prefix + name: tensor
        for index, layer in enumerate(layers)
        for name, tensor in source.read_layer(index, layer).items()
    }


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_fp8_is_loaded_as_transformers_does(dtype: str, tmp_path: Path) -> None:
    """Dequantized to config.json's dtype; what is stored unquantized keeps its own."""
    save_fp8(tmp_path, dtype)
    assert_same_bits(
        read_layers(tmp_path),
        load_dequantized(tmp_path, FineGrainedFP8Config(dequantize=True, weight_block_size=BLOCK)),
    )


def test_fp8_is_converted(tmp_path: Path) -> None:
    save_fp8(tmp_path / "fp8")
    convert(tmp_path / "fp8", tmp_path / "pipeline", verify=True)
    export(tmp_path / "pipeline", tmp_path / "hf")
    assert_same_bits(load_transformers(tmp_path / "hf"), read_layers(tmp_path / "fp8"))
    for folder in ("pipeline", "hf"):
        fields = json.loads((tmp_path / folder / "config.json").read_text())
        assert "quantization_config" not in fields and fields["dtype"] == "bfloat16"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_fp8_number_has_the_bits_of_transformers(dtype: torch.dtype) -> None:
    numbers = torch.where(CODES & 0x7F == 0x7F, 0, CODES)
    weight = torch.stack((CODES, numbers)).view(torch.float8_e4m3fn).view(2, 16, 16)
    scales = torch.randn(2, 4, 2).exp2()
    for form in (scales, scales.bfloat16(), scales.to(torch.float8_e8m0fnu), (120 + 5 * scales).to(torch.uint8)):
        assert_equal(
            dequantize_fp8(weight, form, (4, 8), dtype), Fp8Dequantize(None)._dequantize_one(weight, form, dtype)
        )


def assert_equal(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype and actual.is_contiguous()
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(actual.signbit(), expected.signbit())  # of zeros


@pytest.mark.parametrize("shape", [(24, 20), (17, 9), (3, 5), (16, 16)])
def test_blocks_are_cut_at_the_edge(shape: tuple[int, int]) -> None:
    weight, scales = quantize_fp8(torch.randn(shape), (16, 8))
    expected = (weight.float() * spread(scales, (16, 8), weight.shape)).bfloat16()
    assert torch.equal(dequantize_fp8(weight, scales, (16, 8), torch.bfloat16), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_mxfp4_number_has_the_bits_of_transformers(dtype: torch.dtype) -> None:
    blocks = CODES.repeat(2 * 3 * 256 * 16 // 256).view(2, 3, 256, 16)
    scales = CODES.expand(2, 3, 256).contiguous()
    assert_equal(dequantize_mxfp4(blocks, scales, dtype), convert_moe_packed_tensors(blocks, scales, dtype=dtype))


BROKEN_CONFIGS: dict[str, tuple[object, tuple[str, ...]]] = {
    "unknown method": ({"quant_method": "awq"}, ("quantized (awq)", "only fp8 and mxfp4")),
    "no method": ({"bits": 4}, ("quantized (no quant_method)",)),
    "not an object": ("fp8", ("quantized (no quant_method)",)),
    "another fp8": (FP8 | {"fmt": "e5m2"}, ("quantization_config.fmt='e5m2'", "only 'e4m3'")),
    "4-bit experts": (FP8 | {"expert_dtype": "fp4"}, ("quantization_config.expert_dtype='fp4'",)),
    "block of one size": (FP8 | {"weight_block_size": [128]}, ("weight_block_size=[128]", "two sizes")),
    "block of nothing": (FP8 | {"weight_block_size": [0, 128]}, ("weight_block_size=[0, 128]",)),
}


@pytest.mark.parametrize("name", BROKEN_CONFIGS)
def test_a_quantization_that_is_not_known_is_refused(name: str, tmp_path: Path) -> None:
    quantization, expected = BROKEN_CONFIGS[name]
    assert_refused({"quantization_config": quantization}, tmp_path, expected)


def test_a_dtype_that_nothing_computes_in_is_refused(tmp_path: Path) -> None:
    assert_refused({"quantization_config": FP8, "dtype": "float8_e4m3fn"}, tmp_path, ("'float8_e4m3fn'", "'bfloat16'"))


def assert_refused(fields: dict[str, object], folder: Path, expected: tuple[str, ...]) -> None:
    build_family_config("deepseek_v3").save_pretrained(folder)
    write_config(folder, **fields)
    with pytest.raises(UserError) as caught:
        open_weights(str(folder))
    assert all(part in str(caught.value) for part in (str(folder / "config.json"), *expected)), caught.value


PROJECTION = "model.layers.2.mlp.experts.3.up_proj.weight"
BROKEN_TENSORS: dict[str, tuple[Callable[[Tensors], object], tuple[str, ...]]] = {
    "no scales": (lambda t: t.pop(PROJECTION + "_scale_inv"), (f"'{PROJECTION}_scale_inv', the scales", "missing")),
    "no weight": (lambda t: t.pop(PROJECTION), (f"'{PROJECTION}'", "1 tensors are missing")),
    "scales of other blocks": (
        lambda t: t.update({PROJECTION + "_scale_inv": torch.ones(2, 6)}),
        (f"'{PROJECTION}_scale_inv' has shape [2, 6]", "[24, 48] in blocks of [8, 8] has [3, 6]", "weight_block_size"),
    ),
    "another fp8": (
        lambda t: t.update({PROJECTION: t[PROJECTION].float().to(torch.float8_e5m2)}),
        (f"'{PROJECTION}' (float8_e5m2 [24, 48])", "matrices of float8_e4m3fn"),
    ),
    "4 bits in a byte": (
        lambda t: t.update({PROJECTION: torch.ones(24, 24, dtype=torch.int8)}),
        (f"'{PROJECTION}' (int8 [24, 24])",),
    ),
}


@pytest.mark.parametrize("name", BROKEN_TENSORS)
def test_a_broken_fp8_tensor_is_named(name: str, tmp_path: Path) -> None:
    damage, expected = BROKEN_TENSORS[name]
    stored = save_fp8(tmp_path / "fp8")
    damage(stored)
    save_file(stored, tmp_path / "fp8/model.safetensors")
    with pytest.raises(UserError) as caught:
        convert(tmp_path / "fp8", tmp_path / "pipeline")
    assert all(part in str(caught.value) for part in (str(tmp_path / "fp8"), *expected)), caught.value


def test_one_scale_per_matrix(tmp_path: Path) -> None:
    """`weight_block_size` null; scales of activations beside it are not weights."""
    stored = save_fp8(tmp_path)
    for name in [name for name in stored if name.endswith("_scale_inv")]:
        weight = name.removesuffix("_scale_inv")
        stored[name], stored[weight.removesuffix("weight") + "activation_scale"] = torch.tensor(0.5), torch.tensor(1.0)
    save_file(stored, tmp_path / "model.safetensors")
    write_config(tmp_path, quantization_config=FP8 | {"activation_scheme": "static", "weight_block_size": None})
    read = read_layers(tmp_path)
    for name in ("model.layers.0.self_attn.o_proj.weight", "model.layers.3.mlp.shared_experts.up_proj.weight"):
        assert torch.equal(read[name], (stored[name].float() * 0.5).bfloat16())
