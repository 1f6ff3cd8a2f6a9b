"""The command line of the converter: what it hands on, what it says, how it ends."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.adapters import make_adapter
from support.quantized import save_fp8, write_config
from support.tiny import VOCAB_SIZE, save_llama, save_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

import console
import convert2ckpt
from errors import UserError

ROOT = Path(__file__).resolve().parents[1]


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    monkeypatch.setattr(sys, "argv", ["convert2ckpt.py", *map(str, arguments)])
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # pytest keeps its handlers
    return convert2ckpt.main()


def test_there_with_the_real_command_and_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From another folder, as a user may: nothing depends on the working directory."""
    expected = save_llama(tmp_path / "hf").state_dict()
    save_tokenizer(tmp_path / "hf")
    command = [sys.executable, ROOT / "convert2ckpt.py", "--model_name_or_path", "hf", "--output_dir", "new/ckpt"]
    there = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (there.returncode, there.stdout, there.stderr) == (0, "wrote new/ckpt\n", "")
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    assert run(monkeypatch, "--model_name_or_path", "new/ckpt", "--output_dir", "back", "--to_hf") in (0, None)
    assert capsys.readouterr().out == "wrote back\n"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in expected.items())
    ids = [AutoTokenizer.from_pretrained(tmp_path / name)("some text").input_ids for name in ("hf", "back")]
    assert ids[0] == ids[1]


def test_every_option_arrives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hf, pipeline, back = tmp_path / "hf", tmp_path / "pipeline", tmp_path / "back"
    save_llama(hf)
    save_tokenizer(hf)
    fields = json.loads((hf / "config.json").read_text())
    (hf / "config.json").write_text(json.dumps({**fields, "auto_map": {"AutoConfig": "configuration_x.XConfig"}}))
    assert run(monkeypatch, "--model_name_or_path", hf, "--output_dir", pipeline) == 1
    tokens = [
        "--bos_token",
        "<begin>",
        "--eos_token",
        "<end>",
        "--pad_token",
        "<none>",
        "--add_special_tokens",
        "<a>",
        "<b>",
    ]
    there = [
        "--model_name_or_path",
        hf,
        "--output_dir",
        pipeline,
        "--trust_remote_code",
        "--dtype",
        "bf16",
        "--workers",
        "2",
        "--verify",
    ]
    assert run(monkeypatch, *there, *tokens) == 0
    assert run(monkeypatch, *there, *tokens) == 1
    assert run(monkeypatch, *there, *tokens, "--overwrite") == 0
    to_hf = [
        "--to_hf",
        "--model_name_or_path",
        pipeline,
        "--output_dir",
        back,
        "--dtype",
        "fp16",
        "--max_shard_size",
        "50KB",
        "--workers",
        "2",
        "--verify",
    ]
    capsys.readouterr()
    assert run(monkeypatch, *to_hf) == 0
    assert capsys.readouterr().out == f"wrote {back}; every tensor read back is the source's\n"
    assert run(monkeypatch, *to_hf) == 1
    assert run(monkeypatch, *to_hf, "--overwrite") == 0

    assert "auto_map" not in json.loads((pipeline / "config.json").read_text())
    config = json.loads((back / "config.json").read_text())
    assert [config[f"{name}_token_id"] for name in ("bos", "eos", "pad")] == [
        VOCAB_SIZE,
        VOCAB_SIZE + 1,
        VOCAB_SIZE + 2,
    ]
    assert config["vocab_size"] == VOCAB_SIZE + 5 and config["dtype"] == "float16"
    assert AutoTokenizer.from_pretrained(back)("<a><b>").input_ids == [VOCAB_SIZE + 3, VOCAB_SIZE + 4]
    shards = list(back.glob("*.safetensors"))
    assert len(shards) > 5 and all(
        tensor.dtype == torch.float16 for shard in shards for tensor in load_file(shard).values()
    )
    assert torch.load(pipeline / "global_step0/layer_00-model_states.pt")["weight"].dtype == torch.bfloat16


def test_the_base_of_an_adapter_and_files_of_a_user_are_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    save_llama(base, num_hidden_layers=1)
    make_adapter(adapter, base)
    before = (base / "model.safetensors").read_bytes()
    merge = ("--to_hf", "--model_name_or_path", adapter, "--overwrite", "--output_dir")
    assert run(monkeypatch, *merge, base) == 1
    assert f"output_dir {base} overlaps with the source {base}" in capsys.readouterr().err
    other = tmp_path / "other"
    shutil.copytree(base, other)
    (other / "notes.txt").touch()
    assert run(monkeypatch, *merge, other) == 1
    assert "holds notes.txt, which neither a conversion nor an export of a run wrote" in capsys.readouterr().err
    assert (base / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes() == before


def test_an_error_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hf, pipeline, out = tmp_path / "hf", tmp_path / "pipeline", tmp_path / "out"
    save_llama(hf)
    capsys.readouterr()
    assert run(monkeypatch, "--model_name_or_path", hf, "--output_dir", pipeline) == 0
    assert capsys.readouterr().err == f"warning: {hf} holds no tokenizer, so {pipeline} will hold none\n"
    for arguments, message in (
        (["--model_name_or_path", hf, "--output_dir", pipeline], "exists; pass --overwrite"),
        (
            ["--model_name_or_path", "no/such: id", "--output_dir", pipeline],
            "exists; pass --overwrite",
        ),  # before any download
        (["--model_name_or_path", pipeline, "--output_dir", out], "pass --to_hf"),
        (["--model_name_or_path", tmp_path / "no such", "--output_dir", out], "is not a folder here"),
        (["--model_name_or_path", tmp_path, "--output_dir", out], f"did you mean {hf} or {pipeline}?"),
        (
            ["--to_hf", "--model_name_or_path", pipeline, "--output_dir", out, "--max_shard_size", "big"],
            "--max_shard_size 'big'",
        ),
        (["--to_hf", "--model_name_or_path", pipeline, "--output_dir", out, "--pad_token", "<p>"], "with --to_hf"),
        (["--model_name_or_path", hf, "--output_dir", out, "--workers", "0"], "--workers 0: at least 1"),
    ):
        capsys.readouterr()
        assert run(monkeypatch, *arguments) == 1
        (line,) = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("warning: ")]
        assert line.startswith("error: ") and message in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "pipeline"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user, to whom a folder is closed")
@pytest.mark.parametrize("closed", ["hf", "hf/model.safetensors", "target"])
def test_no_permission_is_one_line(closed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_llama(tmp_path / "hf")
    save_tokenizer(tmp_path / "hf")
    assert (
        run(monkeypatch, "--model_name_or_path", tmp_path / "hf", "--output_dir", tmp_path / "warm") == 0
    )  # imports: Python may be root's own
    (tmp_path / "target").mkdir()
    for file in (tmp_path / "hf").iterdir():
        os.chmod(file, 0o644)
    os.chmod(tmp_path / closed, 0o700 if closed != "target" else 0o755)
    for folder in (tmp_path, *tmp_path.parents[:-2]):
        os.chmod(folder, 0o755)  # pytest's are its own user's
    said = tmp_path / "said"
    if (pid := os.fork()) == 0:
        code = 99
        try:
            torch.set_num_threads(1)
            sys.stderr = open(said, "w", buffering=1)
            os.seteuid(65534)
            sys.argv = [
                "convert2ckpt.py",
                "--model_name_or_path",
                str(tmp_path / "hf"),
                "--output_dir",
                str(tmp_path / "target" / "new"),
            ]
            code = convert2ckpt.main()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    line = said.read_text()
    assert (
        line.startswith("error: ")
        and line.count("\n") == 1
        and "ermission denied" in line
        and str(tmp_path / closed) in line
    ), line


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_it_and_cleans_up(
    number: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_llama(tmp_path / "hf")
    pid = os.fork()
    if pid == 0:
        torch.set_num_threads(1)
        signal.signal(signal.SIGINT, signal.default_int_handler)

        console.Progress.reach = lambda self, done, total: os.kill(os.getpid(), number) if done else None
        sys.argv = [
            "convert2ckpt.py",
            "--model_name_or_path",
            str(tmp_path / "hf"),
            "--output_dir",
            str(tmp_path / "pipeline"),
        ]
        exit_code = 1
        try:
            exit_code = convert2ckpt.main()
        except SystemExit as end:
            exit_code = end.code
        finally:
            os._exit(exit_code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == code
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_quantized_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Dequantized and compared; a method that is not known is one line."""
    save_fp8(tmp_path / "fp8")
    save_tokenizer(tmp_path / "fp8")
    arguments = ("--model_name_or_path", tmp_path / "fp8", "--output_dir", tmp_path / "pipeline")
    assert run(monkeypatch, *arguments, "--verify") == 0
    assert capsys.readouterr().out == f"wrote {tmp_path}/pipeline; every tensor read back is the source's\n"
    write_config(tmp_path / "fp8", quantization_config={"quant_method": "awq"})
    assert run(monkeypatch, *arguments, "--overwrite") == 1
    refused = capsys.readouterr().err.splitlines()
    assert len(refused) == 1 and "quantized (awq), and only fp8, mxfp4 and int4" in refused[0]


def test_sizes() -> None:
    sizes = {"5GB": 5 * 10**9, "1.5MB": 1_500_000, "2GiB": 2**31, "70000": 70_000, " 3 kb": 3_000}
    assert {text: convert2ckpt.parse_size(text) for text in sizes} == sizes
    for text in ("", "GB", "0GB", "-1MB", "5XB", "5IB"):
        with pytest.raises(UserError, match="is not a valid size"):
            convert2ckpt.parse_size(text)
