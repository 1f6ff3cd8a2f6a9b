"""Published weights that are quantized. The oracle is `transformers`' dequantization, bit by bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.families import build_family_config
from support.model_folders import Tensors, assert_same_bits, convert, export, load_transformers, read_layers
from support.quantized import (
    BLOCK,
    FP8,
    INT4,
    INT4_WEIGHTS,
    pack_int4,
    quantize_fp8,
    save_fp8,
    save_int4,
    save_mxfp4,
    spread,
    write_config,
)
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from errors import UserError
from models.layers import int4
from models.weights import quantized
from models.weights.quantized import dequantize_fp8, dequantize_mxfp4
from models.weights.sources import open_weights

CODES = torch.arange(256, dtype=torch.uint8)


def load_dequantized(folder: Path, quantization: Any) -> Tensors:
    """Return the oracle's weights."""
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=quantization).state_dict()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_fp8_is_loaded_as_transformers_does(dtype: str, tmp_path: Path) -> None:
    """Dequantized to config.json's dtype; unquantized tensors keep their own."""
    stored = save_fp8(tmp_path, dtype)
    read = read_layers(tmp_path)
    expected = load_dequantized(tmp_path, FineGrainedFP8Config(dequantize=True, weight_block_size=BLOCK))
    unquantized = {name for name in read.keys() & stored.keys() if name + "_scale_inv" not in stored}
    assert_same_bits({name: read[name] for name in unquantized}, {name: stored[name] for name in unquantized})
    assert_same_bits(
        {name: cast_like(tensor, expected[name]) if name in unquantized else tensor for name, tensor in read.items()},
        expected,
    )


def cast_like(tensor: torch.Tensor, loaded: torch.Tensor) -> torch.Tensor:
    """Return an unquantized tensor of a file as `transformers` loads it: from 5.24 on in the model's dtype, and gates
    in fp32."""
    return tensor.to(loaded.dtype)


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_fp8_with_indexers_becomes_bf16(family: str, tmp_path: Path) -> None:
    """There and back: an export has what `transformers` loads, indexers included, in bf16 and without scales."""
    stored = save_fp8(tmp_path / "fp8", family=family)
    assert any("indexer.wq_b.weight_scale_inv" in name for name in stored)
    expected = load_dequantized(tmp_path / "fp8", FineGrainedFP8Config(dequantize=True, weight_block_size=BLOCK))
    convert(tmp_path / "fp8", tmp_path / "pipeline")
    written = load_file(export(tmp_path / "pipeline", tmp_path / "hf") / "model.safetensors")
    assert not any("scale_inv" in name for name in written)
    assert {tensor.dtype for name, tensor in written.items() if "e_score" not in name} == {torch.bfloat16}
    loaded = load_dequantized(tmp_path / "hf", None)
    assert_same_bits({name: cast_like(tensor, expected[name]) for name, tensor in loaded.items()}, expected)


def test_mxfp4_is_loaded_as_transformers_does(tmp_path: Path) -> None:
    save_mxfp4(tmp_path)
    assert_same_bits(read_layers(tmp_path), load_dequantized(tmp_path, Mxfp4Config(dequantize=True)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_int4_is_what_was_packed(dtype: str, tmp_path: Path) -> None:
    """Each number of 4 bits times its scale, rounded once. The config's `kimi_k2` is read as the architecture it is."""
    stored = save_int4(tmp_path, dtype)
    read = read_layers(tmp_path)
    for name in (name.removesuffix("_packed") for name in stored if name.endswith("_packed")):
        prefix, expert, projection = name.removesuffix(".weight").rsplit(".", 2)
        stack = read[f"{prefix}.{'down_proj' if projection == 'down_proj' else 'gate_up_proj'}"][int(expert)]
        found = stack if projection == "down_proj" else stack.chunk(2)[projection == "up_proj"]
        words = stored[f"{name}_packed"].numpy().view("uint32").astype("int64")
        numbers = torch.stack([torch.tensor((words >> shift) % 16 - 8) for shift in range(0, 32, 4)], dim=2).flatten(1)
        scales = stored[f"{name}_scale"].float().repeat_interleave(32, dim=1)
        assert torch.equal(found, (numbers * scales).to(getattr(torch, dtype)))
    unquantized = read.keys() & stored.keys()
    assert_same_bits({name: read[name] for name in unquantized}, {name: stored[name] for name in unquantized})


def test_a_word_is_what_compressed_tensors_packs() -> None:
    """Its `pack_to_int32` is the oracle (0.20.1)."""
    numbers, word = torch.tensor([[-8, -7, -1, 0, 1, 7, 3, -4]]), 1274644240
    assert pack_int4(numbers).tolist() == [[word]]
    parts = torch.tensor([[[word] * 4]], dtype=torch.int32), torch.full((1, 1, 1), 0.5)
    assert torch.equal(int4.dequantize(parts, (1, 32), torch.float32)[0], numbers.repeat(1, 4) / 2)


@pytest.mark.parametrize("save", [save_fp8, save_mxfp4, save_int4])
def test_a_converted_folder_is_not_quantized(save: Callable[[Path], Tensors], tmp_path: Path) -> None:
    save(tmp_path / "quantized")
    convert(tmp_path / "quantized", tmp_path / "pipeline", verify=True)
    export(tmp_path / "pipeline", tmp_path / "hf")
    expected, loaded = read_layers(tmp_path / "quantized"), load_transformers(tmp_path / "hf")
    assert_same_bits(read_layers(tmp_path / "hf"), expected)
    assert_same_bits({name: cast_like(tensor, loaded[name]) for name, tensor in expected.items()}, loaded)
    for folder in ("pipeline", "hf"):
        fields = json.loads((tmp_path / folder / "config.json").read_text())
        assert "quantization_config" not in fields and fields["dtype"] == "bfloat16"


def test_a_conversion_dequantizes_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The output is planned from the headers of the files."""
    count = sum(name.endswith("_scale_inv") for name in save_fp8(tmp_path / "fp8"))
    read: list[torch.Size] = []

    def watch(weight: torch.Tensor, *args: Any) -> torch.Tensor:
        read.extend([] if weight.is_meta else [weight.shape])
        return dequantize_fp8(weight, *args)

    monkeypatch.setattr(quantized, "dequantize_fp8", watch)
    convert(tmp_path / "fp8", tmp_path / "pipeline")
    assert len(read) == count


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
    "unknown method": ({"quant_method": "awq"}, ("quantized (awq)", "only fp8, mxfp4 and int4 of compressed-tensors")),
    "no method": ({"bits": 4}, ("quantized (no quant_method)",)),
    "not an object": ("fp8", ("quantized (no quant_method)",)),
    "another fp8": (FP8 | {"fmt": "e5m2"}, ("quantization_config.fmt='e5m2'", "only 'e4m3'")),
    "4-bit experts": (FP8 | {"expert_dtype": "fp4"}, ("quantization_config.expert_dtype='fp4'",)),
    "another format": (INT4 | {"format": "int-quantized"}, ("config.format='int-quantized'", "only 'pack-quantized'")),
    "no groups": (INT4 | {"config_groups": None}, ("quantization_config.config_groups=None",)),
    "a group without weights": (INT4 | {"config_groups": {"A": {"weights": None}}}, ("config_groups.A.weights=None",)),
    **{
        f"{key}={value}": (
            INT4 | {"config_groups": {"A": {"weights": INT4_WEIGHTS | {key: value}}}},
            (f"config_groups.A.weights.{key}={value!r}: only {known!r}",),
        )
        for key, value, known in (
            ("num_bits", 8, 4),
            ("type", "float", "int"),
            ("symmetric", False, True),
            ("group_size", 128, 32),
            ("strategy", "channel", "group"),
            ("actorder", "group", None),
        )
    },
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
DOWN = "model.layers.1.mlp.experts.down_proj"
EXPERT = "model.layers.2.mlp.experts.3.down_proj.weight"
Damage = Callable[[Tensors], object]
BROKEN_TENSORS: dict[str, tuple[Callable[[Path], Tensors], Damage, tuple[str, ...]]] = {
    "no scales": (
        save_fp8,
        lambda t: t.pop(PROJECTION + "_scale_inv"),
        (f"'{PROJECTION}_scale_inv', the scales of an fp8 tensor, is missing",),
    ),
    "no weight": (save_fp8, lambda t: t.pop(PROJECTION), (f"'{PROJECTION}'", "missing tensors: 1")),
    "scales of other blocks": (
        save_fp8,
        lambda t: t.update({PROJECTION + "_scale_inv": torch.ones(2, 6)}),
        (f"'{PROJECTION}_scale_inv' has shape [2, 6]", "[24, 48] in blocks of [8, 8] has [3, 6]", "weight_block_size"),
    ),
    "another fp8": (
        save_fp8,
        lambda t: t.update({PROJECTION: t[PROJECTION].float().to(torch.float8_e5m2)}),
        (f"'{PROJECTION}' (float8_e5m2 [24, 48])", "matrices of float8_e4m3fn"),
    ),
    "4 bits in a byte": (
        save_fp8,
        lambda t: t.update({PROJECTION: torch.ones(24, 24, dtype=torch.int8)}),
        (f"'{PROJECTION}' (int8 [24, 24])",),
    ),
    "scales of another tool": (
        save_fp8,
        lambda t: t.update({PROJECTION + "_scale": t.pop(PROJECTION + "_scale_inv")}),
        (f"'{PROJECTION}_scale'", "AutoFP8", "only '_scale_inv'"),
    ),
    "weight of another shape": (
        save_fp8,
        lambda t: t.update(dict(zip((PROJECTION, PROJECTION + "_scale_inv"), quantize_fp8(torch.ones(8, 48))))),
        (f"'{PROJECTION}' has shape [8, 48]", "config.json makes it [24, 48]"),
    ),
    "blocks without scales": (save_mxfp4, lambda t: t.pop(DOWN + "_scales"), (f"'{DOWN}_scales', a part", "missing")),
    "scales without blocks": (save_mxfp4, lambda t: t.pop(DOWN + "_blocks"), (f"'{DOWN}_blocks', a part", "missing")),
    "no experts": (
        save_mxfp4,
        lambda t: [t.pop(DOWN + part) for part in ("_blocks", "_scales")],
        (f"'{DOWN}'", "missing tensors: 1"),
    ),
    "other groups": (
        save_mxfp4,
        lambda t: t.update({DOWN + "_scales": t[DOWN + "_scales"][..., :2].contiguous()}),
        (f"'{DOWN}_blocks' (uint8 [8, 64, 3, 16])", f"'{DOWN}_scales' (uint8 [8, 64, 2])"),
    ),
    "int4 without scales": (save_int4, lambda t: t.pop(EXPERT + "_scale"), (f"'{EXPERT}_scale', a part", "missing")),
    "int4 without a shape": (save_int4, lambda t: t.pop(EXPERT + "_shape"), (f"'{EXPERT}_shape', a part", "missing")),
    "asymmetric int4": (
        save_int4,
        lambda t: t.update({EXPERT + "_zero_point": torch.zeros(8, 1, dtype=torch.int32)}),
        (f"'{EXPERT}_zero_point' is a part of an int4 tensor that is asymmetric",),
    ),
    "int4 in another order": (
        save_int4,
        lambda t: t.update({EXPERT + "_g_idx": torch.arange(32)}),
        (f"'{EXPERT}_g_idx'", "that is in the order of activations"),
    ),
    "int4 of other groups": (
        save_int4,
        lambda t: t.update({EXPERT + "_scale": torch.ones(64, 2)}),
        (f"'{EXPERT}_packed' (int32 [64, 4]) and '{EXPERT}_scale' (float32 [64, 2]) do not fit",),
    ),
    "8 bits": (
        save_int4,
        lambda t: t.update({EXPERT + "_packed": torch.zeros(64, 8, dtype=torch.int32)}),
        (f"'{EXPERT}_packed' (int32 [64, 8])", "int32 [rows, columns / 8]"),
    ),
    "int4 of another shape": (
        save_int4,
        lambda t: t.update({EXPERT + "_shape": torch.tensor([64, 31])}),
        (f"'{EXPERT}_shape' is [64, 31]", "packs [64, 32]"),
    ),
    "int4 of another model": (
        save_int4,
        lambda t: (
            t.update({EXPERT + part: t[EXPERT + part][:32].clone() for part in ("_packed", "_scale")})
            or t.update({EXPERT + "_shape": torch.tensor([32, 32])})
        ),
        (f"'{EXPERT}' has shape [32, 32]", "config.json makes it [64, 32]"),
    ),
    "packed otherwise": (
        save_mxfp4,
        lambda t: t.update({DOWN + "_blocks": t[DOWN + "_blocks"].flatten(2)}),
        (f"'{DOWN}_blocks' (uint8 [8, 64, 48])", "another format"),
    ),
}


@pytest.mark.parametrize("name", BROKEN_TENSORS)
def test_a_broken_tensor_is_named(name: str, tmp_path: Path) -> None:
    save, damage, expected = BROKEN_TENSORS[name]
    stored = save(tmp_path / "quantized")
    damage(stored)
    save_file(stored, tmp_path / "quantized/model.safetensors")
    with pytest.raises(UserError) as caught:
        convert(tmp_path / "quantized", tmp_path / "pipeline")
    assert all(part in str(caught.value) for part in (str(tmp_path / "quantized"), *expected)), caught.value


def test_scales_may_lie_in_another_shard(tmp_path: Path) -> None:
    """Also for layers that predict further tokens, which are omitted."""
    stored = save_fp8(tmp_path)
    expected = read_layers(tmp_path)
    further = "model.layers.4.eh_proj.weight"
    stored[further], stored[further + "_scale_inv"] = quantize_fp8(torch.ones(48, 96))
    write_config(tmp_path, num_nextn_predict_layers=1)
    (tmp_path / "model.safetensors").unlink()
    shards = {name: f"model-0000{1 + name.endswith('_scale_inv')}-of-00002.safetensors" for name in stored}
    for shard in set(shards.values()):
        save_file({name: stored[name] for name in stored if shards[name] == shard}, tmp_path / shard)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    assert_same_bits(read_layers(tmp_path), expected)


def test_one_scale_per_matrix(tmp_path: Path) -> None:
    """`weight_block_size` null; scales of activations in the folder are not weights."""
    stored = save_fp8(tmp_path)
    for name in [name for name in stored if name.endswith("_scale_inv")]:
        weight = name.removesuffix("_scale_inv")
        stored[name], stored[weight.removesuffix("weight") + "activation_scale"] = torch.tensor(0.5), torch.tensor(1.0)
    save_file(stored, tmp_path / "model.safetensors")
    write_config(tmp_path, quantization_config=FP8 | {"activation_scheme": "static", "weight_block_size": None})
    read = read_layers(tmp_path)
    for name in ("model.layers.0.self_attn.o_proj.weight", "model.layers.3.mlp.shared_experts.up_proj.weight"):
        assert torch.equal(read[name], (stored[name].float() * 0.5).bfloat16())
