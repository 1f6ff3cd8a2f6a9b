"""Adapters merged into a quantized base model, written in the form in which that is published."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.adapters import make_adapter
from support.model_folders import Tensors, export, read_layers
from support.quantized import FP8, save_fp8, save_int4, save_mxfp4, spread, write_config
from support.tiny import save_llama, save_tokenizer

import convert2ckpt
from models.conversion.requantized import quantize
from models.heads.sequence_classification import SEQUENCE_CLASSIFICATION
from models.weights.hugging_face_folder import HuggingFaceFolder

# Each way to publish, the attention of its model, which is not quantized in two of them, and how far a rounded tensor
# is from what was merged at most
PUBLISHED: dict[str, tuple[Callable[..., Tensors], str, float]] = {
    "fp8": (save_fp8, "self_attn.o_proj", 0.03),
    "mxfp4": (save_mxfp4, "mlp.experts", 0.12),
    "int4": (save_int4, "mlp.experts", 0.11),
}


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    monkeypatch.setattr(sys, "argv", ["convert2ckpt.py", *map(str, arguments)])
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # pytest keeps its handlers
    return convert2ckpt.main()


def save_adapter(folder: Path, base: Path, **options: object) -> None:
    """A peft folder on a quantized model."""
    plain = folder.with_name("plain")
    export(base, plain)
    make_adapter(folder, plain, **options)
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": str(base)}))


@pytest.mark.parametrize("form", PUBLISHED)
def test_what_the_adapter_changes_is_rounded_and_the_rest_is_copied(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save, changed, most = PUBLISHED[form]
    base, peft, out = (tmp_path / name for name in ("base", "peft", "out"))
    stored = save(base)
    save_tokenizer(base)
    targets = {"target_modules": ["o_proj"]} if form == "fp8" else {}
    save_adapter(peft, base, **targets)
    convert = ("--to_hf", "--requantize", "--verify", "--model_name_or_path", peft, "--output_dir", out)
    assert run(monkeypatch, *convert) == 0
    said = capsys.readouterr().out

    found = load_file(out / "model.safetensors")
    assert {name: (each.shape, each.dtype) for name, each in found.items()} == {
        name: (each.shape, each.dtype) for name, each in stored.items()
    }
    described, before = (json.loads((folder / "config.json").read_text()) for folder in (out, base))
    assert described["quantization_config"] == before["quantization_config"]

    merged, written, plain = (read_layers(folder) for folder in (peft, out, base))
    quantized = HuggingFaceFolder(base).list_quantized()
    errors, sums = {}, torch.zeros(3, dtype=torch.float64)
    for name, unrounded in merged.items():
        tensor = unrounded.to(plain[name].dtype)
        if torch.equal(tensor, plain[name]):
            assert torch.equal(written[name], tensor), name
        elif name in quantized or ".experts." in name:
            error, change, whole = (
                part.double().square().sum() for part in (written[name] - tensor, tensor - plain[name], tensor)
            )
            assert changed in name
            errors[name] = (error / whole).sqrt().item()
            sums += torch.stack((error, change, whole))
        else:
            assert torch.equal(written[name], tensor), name
    assert errors and 0 < max(errors.values()) < most, errors
    copied = {name for name in stored if torch.equal(found[name].view(torch.uint8), stored[name].view(torch.uint8))}
    untouched = [name for name in quantized if changed not in name]
    assert all(name in copied for each in untouched for name in stored if name.startswith(each))
    share, change = ((sums[number] / sums[2]).sqrt().item() for number in (0, 1))
    assert f"{len(HuggingFaceFolder(base).list_quantized()) - len(untouched)} tensors rounded to {form}: " in said
    assert f": off by {share:.2%} of what was merged, at most " in said
    assert f"where the adapter has changed them by {change:.2%}" in said
    assert said.endswith(f"wrote {out}; every tensor read back is what was written\n"), said


@pytest.mark.parametrize("form", PUBLISHED)
def test_numbers_of_the_form_are_kept(form: str, tmp_path: Path) -> None:
    """Numbers that were quantized once are not changed by being quantized again, but for groups whose largest number is
    not the largest of the form."""
    PUBLISHED[form][0](tmp_path)
    folder = HuggingFaceFolder(tmp_path)
    for name in folder.list_quantized():
        parts = folder.read_published(name)
        exact = folder.read(name).float()
        again = dict(zip(parts, quantize(folder.quantization, exact, tuple(parts.values())), strict=True))
        assert [(each.shape, each.dtype) for each in again.values()] == [
            (each.shape, each.dtype) for each in parts.values()
        ]
        difference = (folder.dequantize(name, again).float() - exact).norm() / exact.norm()
        assert difference < (0.07 if form == "int4" else 0.01 if form == "fp8" else 1e-6), name


def test_scales_are_powers_of_two_where_they_were(tmp_path: Path) -> None:
    save_fp8(tmp_path)
    folder = HuggingFaceFolder(tmp_path)
    weight = torch.randn(20, 12)
    weight[:8, :8] = 0
    for dtype in (torch.uint8, torch.float8_e8m0fnu):
        published = (torch.empty(20, 12), torch.empty(3, 2, dtype=torch.uint8).view(dtype))
        codes, scales = quantize(folder.quantization, weight, published)
        assert scales.dtype == dtype and scales.shape == (3, 2) and codes[:8, :8].float().abs().max() == 0
        wide = spread((scales.view(torch.uint8).float() - 127).exp2(), (8, 8), weight.shape)
        assert (codes.float() * wide - weight).norm() < 0.03 * weight.norm()
        assert codes.float().abs().max() <= 448


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e8m0fnu])
def test_scales_that_are_powers_of_two_are_written_so(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loaders drop all but their exponents (`scale_fmt`), whatever they are stored in."""
    base, peft, out = (tmp_path / name for name in ("base", "peft", "out"))
    stored = save_fp8(base)
    for name in [name for name in stored if name.endswith("_scale_inv")]:
        stored[name] = stored[name].log2().ceil().exp2().to(dtype)
    save_file(stored, base / "model.safetensors")
    save_tokenizer(base)
    save_adapter(peft, base)
    convert = ("--to_hf", "--requantize", "--verify", "--model_name_or_path", peft, "--output_dir", out)
    assert run(monkeypatch, *convert) == 0
    scales = {name: each for name, each in load_file(out / "model.safetensors").items() if name.endswith("_scale_inv")}
    assert scales and all(each.dtype == dtype for each in scales.values())
    assert all(torch.equal(each.float().log2().round().exp2(), each.float()) for each in scales.values())
    assert any(not torch.equal(each.float(), stored[name].float()) for name, each in scales.items())


def test_what_loaders_would_misread_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base, peft = tmp_path / "base", tmp_path / "peft"
    save_fp8(base, family="qwen3_moe")
    save_tokenizer(base)
    plain = tmp_path / "dequantized"
    export(base, plain)
    make_adapter(peft, plain, ["q_proj"], SEQUENCE_CLASSIFICATION)
    file = peft / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": str(base)}))
    described = json.loads((plain / "config.json").read_text()) | {
        "architectures": ["Qwen3MoeForSequenceClassification"]
    }
    (peft / "config.json").write_text(
        json.dumps(described | {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}})
    )
    convert = ("--to_hf", "--requantize", "--model_name_or_path", peft, "--output_dir", tmp_path / "out")
    assert run(monkeypatch, *convert) == 1
    assert f"'score.weight' is not in {base}, and loaders would take it for quantized" in capsys.readouterr().err
    save_adapter(tmp_path / "whole", base)
    write_config(base, quantization_config=FP8 | {"activation_scheme": "static"})
    assert run(monkeypatch, *convert[:-3], tmp_path / "whole", *convert[-2:]) == 1
    assert "has scales of activations (activation_scheme=static)" in capsys.readouterr().err


def test_what_is_not_published_so_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base, peft, quantized = (tmp_path / name for name in ("base", "peft", "quantized"))
    save_llama(base)
    save_tokenizer(base)
    make_adapter(peft, base)
    arguments = ("--to_hf", "--requantize", "--output_dir", tmp_path / "out", "--model_name_or_path")
    assert run(monkeypatch, *arguments, peft) == 1
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"error: --requantize: {base} is not in fp8, mxfp4 or int4 as it was published; omit it, or give an adapter of "
        "a model that is"
    )
    assert run(monkeypatch, *arguments, peft, "--dtype", "bf16") == 1
    assert "--requantize goes with --to_hf, without --dtype" in capsys.readouterr().err
    assert run(monkeypatch, *arguments[1:], peft) == 1
    assert "--requantize goes with --to_hf, without --dtype" in capsys.readouterr().err

    save_int4(quantized)
    save_adapter(tmp_path / "damaged", quantized)
    file = tmp_path / "damaged" / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if "experts" in name and "lora_B" in name)
    save_file({**tensors, name: torch.full_like(tensors[name], torch.nan)}, file)
    assert run(monkeypatch, *arguments, tmp_path / "damaged") == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert (
        "holds numbers that are not finite; is the adapter damaged, or its base model?" in error and "experts" in error
    )
    assert not (tmp_path / "out").exists()


def test_an_adapter_that_changes_nothing_gives_the_published_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stored = save_fp8(tmp_path / "base")
    save_tokenizer(tmp_path / "base")
    write_config(tmp_path / "base", architectures=["DeepseekV3ForCausalLM"])
    convert = ("--to_hf", "--requantize", "--model_name_or_path", tmp_path / "base", "--output_dir", tmp_path / "out")
    assert run(monkeypatch, *convert) == 0
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(found[name].view(torch.uint8), each.view(torch.uint8)) for name, each in stored.items())
    assert f" tensors as in {tmp_path}/base, bit for bit\n" in capsys.readouterr().out
