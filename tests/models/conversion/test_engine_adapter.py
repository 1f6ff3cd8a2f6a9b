"""A LoRA run's export in the form of an engine, by the converter's command line, and the script that checks it."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from support.adapters import make_adapter
from support.families import save_family
from support.tiny import save_llama, save_tokenizer

import convert2ckpt
from scripts import check_adapter

WEIGHTS = "adapter_model.safetensors"


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
