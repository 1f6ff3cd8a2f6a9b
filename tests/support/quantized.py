"""Small models quantized as they are published. transformers makes mxfp4 only with kernels from the hub."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from support.cases import relative_difference
from support.families import build_family
from support.model_folders import Tensors
from transformers import AutoModelForCausalLM

from models.adapters.targets import list_adaptable
from models.architecture.lookup import build_layers

BLOCK = (8, 8)  # divides every size of the small model: transformers refuses, or misreads, blocks that are cut
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(BLOCK)}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"]}
INT4_WEIGHTS = {
    "num_bits": 4,
    "type": "int",
    "symmetric": True,
    "strategy": "group",
    "group_size": 32,
    "actorder": None,
}
INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {"group_0": {"targets": ["Linear"], "input_activations": None, "weights": INT4_WEIGHTS}},
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
}
KEPT = ("embed_tokens", "lm_head", "mlp.gate.", "norm", "weights_proj")  # what DeepSeek-V3 and 3.2 do not quantize


def quantize_fp8(weight: torch.Tensor, block: tuple[int, int] = BLOCK) -> tuple[torch.Tensor, torch.Tensor]:
    """weight [R, C] as (float8_e4m3fn, scales), blocks cut at the edge."""
    rows, columns = block
    parts = [part.float().abs().amax().item() for band in weight.split(rows) for part in band.split(columns, 1)]
    scales = torch.tensor(parts).view(-(-weight.shape[0] // rows), -1) / 448
    return (weight.float() / spread(scales, block, weight.shape)).to(torch.float8_e4m3fn), scales


def spread(scales: torch.Tensor, block: tuple[int, int], shape: torch.Size) -> torch.Tensor:
    return scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[: shape[0], : shape[1]]


def save_fp8(
    folder: Path, dtype: str = "bfloat16", block: tuple[int, int] = BLOCK, family: str = "deepseek_v3", **sizes: int
) -> Tensors:
    """A small DeepSeek-V3, or a family like it, as it is published; returns the stored tensors."""
    build_family(family, **sizes).bfloat16().save_pretrained(folder)
    stored: Tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        stored[name] = tensor.float() if "e_score_correction_bias" in name else tensor
        if tensor.dim() == 2 and not any(part in name for part in KEPT):
            stored[name], stored[name + "_scale_inv"] = quantize_fp8(tensor, block)
    save_file(stored, folder / "model.safetensors")
    write_config(folder, quantization_config=FP8 | {"weight_block_size": list(block)}, dtype=dtype)
    return stored


def save_mxfp4(folder: Path, **sizes: int) -> Tensors:
    """A small gpt-oss as it is published; returns the stored tensors."""
    build_family("gpt_oss", **{"hidden_size": 64, "intermediate_size": 96, **sizes}).bfloat16().save_pretrained(folder)
    stored: Tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, width, rows = tensor.shape
            stored[name + "_blocks"] = torch.randint(256, (experts, rows, width // 32, 16), dtype=torch.uint8)
            stored[name + "_scales"] = torch.randint(120, 126, (experts, rows, width // 32), dtype=torch.uint8)
        else:
            stored[name] = tensor
    save_file(stored, folder / "model.safetensors")
    write_config(folder, quantization_config=MXFP4, dtype="bfloat16")
    return stored


def pack_int4(numbers: torch.Tensor) -> torch.Tensor:
    """numbers [R, C] from -8 to 7 as int32 [R, C / 8]; the first is in the lowest bits."""
    codes = (numbers + 8).to(torch.int64).unflatten(1, (-1, 8))
    return (codes << torch.arange(0, 32, 4)).sum(dim=2).to(torch.int32)


def save_int4(folder: Path, dtype: str = "bfloat16", **sizes: int) -> Tensors:
    """A small DeepSeek-V3 with its experts as Kimi K2 Thinking is published; returns the stored tensors."""
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, **sizes}
    build_family("deepseek_v3", **sizes).bfloat16().save_pretrained(folder)
    stored: Tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if ".experts." not in name:
            stored[name] = tensor.float() if "e_score_correction_bias" in name else tensor
            continue
        groups = tensor.float().unflatten(1, (-1, 32))
        scales = (groups.abs().amax(dim=2) / 7.5).bfloat16()
        numbers = (groups / scales.float().unsqueeze(2)).round().clamp(-8, 7).flatten(1)
        stored |= {f"{name}_packed": pack_int4(numbers), f"{name}_scale": scales}
        stored[f"{name}_shape"] = torch.tensor(tensor.shape)
    save_file(stored, folder / "model.safetensors")
    write_config(folder, model_type="kimi_k2", quantization_config=INT4, dtype=dtype)
    return stored


def write_config(folder: Path, **fields: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def save_rounded(folder: Path, model_folder: Path) -> None:
    """Save the model with the values that its projections, and each expert of its stacks, have in 4 bits."""
    from bitsandbytes import functional  # an optional package

    model = AutoModelForCausalLM.from_pretrained(model_folder)
    held = {
        layer.hf_prefix + name
        for layer in build_layers(deepcopy(model.config))
        for parts in [list_adaptable(layer.build_on_meta())]
        for name in (*(f"{projection}.weight" for projection in parts.projections), *parts.stacks)
    }
    for name, parameter in model.named_parameters():
        if name in held:
            weight = parameter.data
            for matrix in weight if weight.ndim == 3 else [weight]:
                # As one column: on a CPU bitsandbytes (0.50.2) gives blocks of others wrong scales
                packed = functional.quantize_4bit(matrix.view(-1, 1), quant_type="nf4", compress_statistics=True)
                rounded = functional.dequantize_4bit(*packed).view(matrix.shape)
                assert relative_difference(rounded, matrix) > 0.01
                matrix.copy_(rounded)
            held.remove(name)
    assert not held
    model.save_pretrained(folder)
