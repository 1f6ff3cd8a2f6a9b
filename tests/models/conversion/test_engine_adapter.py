"""A LoRA run's export in the form of an engine, by the converter's command line, and the script that checks it."""

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
from support.families import save_family
from support.tiny import save_llama, save_tokenizer

import convert2ckpt
from scripts import check_adapter

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
IN_LAYER = "base_model.model.model.layers.0."
Tensors = dict[str, torch.Tensor]


def run(monkeypatch: pytest.MonkeyPatch, module: object, *arguments: str | Path) -> int:
    monkeypatch.setattr(sys, "argv", ["command", *map(str, arguments)])
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # pytest keeps its handlers
    return module.main()  # type: ignore[attr-defined, no-any-return]


def test_from_peft_to_an_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base, peft, served = (tmp_path / name for name in ("base", "peft", "served"))
    save_tokenizer(save_family(base, "mixtral"))
    make_adapter(peft, base)
    save_tokenizer(peft)
    convert = ("--engine", "vllm", "--model_name_or_path", peft, "--output_dir", served)
    assert run(monkeypatch, convert2ckpt, *convert) == 0
    assert capsys.readouterr().out == f"wrote {served}, for vllm 0.33.0\n"
    names = load_file(served / WEIGHTS).keys()
    assert "base_model.model.model.layers.0.block_sparse_moe.experts.7.w2.lora_B.weight" in names
    assert (served / "tokenizer.json").read_bytes() == (peft / "tokenizer.json").read_bytes()
    assert run(monkeypatch, convert2ckpt, *convert) == 1
    assert run(monkeypatch, convert2ckpt, *convert, "--overwrite") == 0
    capsys.readouterr()

    assert run(monkeypatch, check_adapter, served, "--engine", "vllm") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "vllm 0.33.0, MixtralForCausalLM: experts pairs" and lines[-1] == "all taken"
    assert run(monkeypatch, check_adapter, peft, "--engine", "vllm") == 1
    assert "16 refused" in capsys.readouterr().out
    assert run(monkeypatch, check_adapter, peft, "--engine", "peft", "--model_class", "MixtralForCausalLM") == 0
    assert run(monkeypatch, check_adapter, peft, "--engine", "vllm", "--release", "0.6.0") == 2
    assert run(monkeypatch, check_adapter, tmp_path, "--engine", "vllm") == 2
    assert run(monkeypatch, check_adapter, peft, "--engine", "vllm", "--base", tmp_path) == 2


def test_a_high_rank_needs_a_higher_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_family(tmp_path / "base", "gpt_oss")
    make_adapter(tmp_path / "peft", tmp_path / "base")
    fields = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    (tmp_path / "peft" / "adapter_config.json").write_text(json.dumps({**fields, "rank_pattern": {"absent": 33}}))
    convert = ("--engine", "vllm", "--model_name_or_path", tmp_path / "peft", "--output_dir", tmp_path / "served")
    assert run(monkeypatch, convert2ckpt, *convert) == 0
    assert capsys.readouterr().out.startswith("start vllm with --max-lora-rank 64\nwrote ")


def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    save_llama(tmp_path / "base")
    make_adapter(tmp_path / "peft", tmp_path / "base")
    save_family(tmp_path / "mixture", "qwen3_moe")
    make_adapter(tmp_path / "router", tmp_path / "mixture", target_parameters=["mlp.gate.weight"])
    convert = ("--output_dir", tmp_path / "served", "--engine", "sglang", "--model_name_or_path")
    for arguments, message in (
        ((tmp_path / "base",), "is not a peft folder"),
        ((tmp_path / "peft",), "adapters of 'llama' in the forms of engines are not in the tables"),
        ((tmp_path / "peft", "--to_hf"), "--engine writes an adapter as it is, in another form; omit --to_hf"),
        ((tmp_path / "router", "--output_dir", tmp_path / "router" / "in"), "overlaps with the source"),
        ((tmp_path / "router",), "sglang 0.5.23 cannot serve this adapter: "),
    ):
        assert run(monkeypatch, convert2ckpt, *convert, *arguments) == 1
        assert message in capsys.readouterr().err and not (tmp_path / "served").exists()


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A peft folder of a Qwen3-MoE."""
    folder = tmp_path_factory.mktemp("sound")
    save_family(folder / "base", "qwen3_moe")
    make_adapter(folder / "peft", folder / "base")
    return folder / "peft"


def damage(sound: Path, folder: Path, change: Callable[[Tensors], Tensors] = dict, /, **fields: object) -> None:
    """Write a copy of `sound` with changed tensors and fields to `folder`; a field "absent" is removed."""
    folder.mkdir()
    save_file(change(load_file(sound / WEIGHTS)), folder / WEIGHTS)
    changed = {**json.loads((sound / CONFIG).read_text()), **fields}
    left = {key: value for key, value in changed.items() if value != "absent"}
    (folder / CONFIG).write_text(json.dumps(left))


@pytest.mark.parametrize(
    ("name", "change", "state"),
    [
        ("mlp.experts.base_layer.lora_A", None, "missing"),
        ("mlp.experts.base_layer.lora_A", torch.flatten, "of shape [1536], not [32, 48]"),
        ("self_attn.q_proj.lora_A", lambda tensor: tensor[:, :-1].contiguous(), "of shape [4, 47], not [4, 48]"),
        ("", None, "missing"),
    ],
    ids=["without one A", "one dimension", "of a smaller model", "without tensors"],
)
def test_a_damaged_adapter_is_refused(
    tmp_path: Path,
    sound: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    change: Callable[[torch.Tensor], torch.Tensor] | None,
    state: str,
) -> None:
    def edit(tensors: Tensors) -> Tensors:
        hit = [key for key in tensors if key == f"{IN_LAYER}{name}.weight" or not name]
        return {
            key: change(t) if change and key in hit else t for key, t in tensors.items() if change or key not in hit
        }

    damage(sound, tmp_path / "peft", edit)
    convert = ("--engine", "peft", "--model_name_or_path", tmp_path / "peft", "--output_dir", tmp_path / "served")
    assert run(monkeypatch, convert2ckpt, *convert) == 1
    error = capsys.readouterr().err
    assert f"' is {state}; export the run again" in error and f"'{IN_LAYER}{name}" in error


def test_what_peft_has_defaults_for_is_written(
    tmp_path: Path, sound: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(sound, tmp_path / "source", lora_alpha="absent")
    for engine in ("vllm", "sglang", "peft"):
        convert = ("--engine", engine, "--model_name_or_path", tmp_path / "source", "--output_dir", tmp_path / engine)
        assert run(monkeypatch, convert2ckpt, *convert) == 0
        assert json.loads((tmp_path / engine / CONFIG).read_text())["lora_alpha"] == 8
    damage(sound, tmp_path / "no_r", r="absent")  # of rank 4, and peft's default is 8
    convert = ("--engine", "vllm", "--model_name_or_path", tmp_path / "no_r", "--output_dir", tmp_path / "served")
    assert run(monkeypatch, convert2ckpt, *convert) == 1
    assert "of shape [" in capsys.readouterr().err


def test_ranks_by_name_are_those_that_peft_has_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """peft does not match "down_proj" with the module that it has by the name of its weight."""
    save_family(tmp_path / "base", "qwen3_moe")
    options = {"rank_pattern": {"down_proj": 2}, "target_parameters": ["mlp.experts.down_proj"]}
    make_adapter(tmp_path / "peft", tmp_path / "base", **options)
    convert = ("--engine", "vllm", "--model_name_or_path", tmp_path / "peft", "--output_dir", tmp_path / "served")
    assert run(monkeypatch, convert2ckpt, *convert) == 0


@pytest.mark.parametrize(
    ("fields", "config", "message"),
    [
        ({"r": None}, {}, "has r=None; it has to be a whole number from 1"),
        ({"r": "8"}, {}, "has r='8'; it has to be a whole number from 1"),
        ({"rank_pattern": [1]}, {}, "has rank_pattern=[1]; it has to be a mapping of names to numbers"),
        ({"rank_pattern": {"a": "b"}}, {}, "has rank_pattern.a='b'; it has to be a whole number from 1"),
        ({"modules_to_save": 3}, {}, "has modules_to_save=3; write a list of names there"),
        ({"modules_to_save": "lm_head"}, {}, "has modules_to_save='lm_head'; write a list of names there"),
        ({"peft_version": 19}, {}, "has peft_version=19; write it in quotes, or null"),
        ({}, {"num_hidden_layers": "absent"}, "lacks the sizes of a mixture; give --base"),
        ({}, {"num_experts": "8"}, "lacks the sizes of a mixture; give --base"),
        ({}, {"text_config": []}, ""),
        ({"target_modules": ".*q_proj"}, {}, ""),  # which peft takes
    ],
)
def test_configs_that_cannot_be_checked(
    tmp_path: Path,
    sound: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    fields: dict[str, object],
    config: dict[str, object],
    message: str,
) -> None:
    damage(sound, tmp_path / "peft", **fields)
    base = {**json.loads((sound.parent / "base" / "config.json").read_text()), **config}
    left = {key: value for key, value in base.items() if value != "absent"}
    (tmp_path / "peft" / "config.json").write_text(json.dumps(left))
    assert run(monkeypatch, check_adapter, tmp_path / "peft", "--engine", "peft") == (2 if message else 0)
    assert message in capsys.readouterr().err
