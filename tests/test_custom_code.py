"""Code that a model's folder brings is never run, whatever the person at the keyboard answers."""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.configs import build_config
from support.tiny import VOCAB_SIZE, save_llama, save_tokenizer

import convert2ckpt
from errors import UserError
from scripts import generate
from training.inputs.datasets import load_extended

TOKENIZER = """
from pathlib import Path
from transformers import PreTrainedTokenizerFast

Path({proof!r}).touch()

class XTokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("custom_code") / "hf"
    save_llama(folder, num_hidden_layers=1)
    save_tokenizer(folder)
    return folder


@pytest.fixture
def folder(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model whose tokenizer's code writes the file `ran` next to it, and someone who answers "y" to everything."""
    folder = Path(shutil.copytree(plain, tmp_path / "hf"))
    file = folder / "tokenizer_config.json"
    auto_map = {"AutoTokenizer": [None, "tok_x.XTokenizer"]}
    file.write_text(json.dumps({**json.loads(file.read_text()), "tokenizer_class": "X", "auto_map": auto_map}))
    (folder / "tok_x.py").write_text(TOKENIZER.format(proof=str(tmp_path / "ran")))
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    return folder


def load_for_a_run(folder: Path) -> None:
    load_extended(build_config(f"tokenizer_name_or_path={folder}", "trust_remote_code=true"), "elsewhere")


def write_an_answer(folder: Path) -> None:
    sys.argv = ["generate.py", "--trust_remote_code", "--model_name_or_path", str(folder), "--prompt", "a"]
    generate.main()


def convert_with_a_token(folder: Path) -> None:
    words = ["--model_name_or_path", str(folder), "--output_dir", str(folder.parent / "out"), "--trust_remote_code"]
    convert2ckpt.convert(convert2ckpt.build_parser().parse_args([*words, "--pad_token", "<none>"]))


@pytest.mark.parametrize("load", [load_for_a_run, write_an_answer, convert_with_a_token])
def test_a_tokenizers_code_is_never_run(
    load: Callable[[Path], None], folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", sys.argv)
    with pytest.raises((UserError, SystemExit)) as caught:
        load(folder)
    assert not (tmp_path / "ran").exists() and sys.stdin.read() == "y\n" * 9
    message = str(caught.value)
    assert "\n" not in message, message
    assert message.removeprefix("error: ").startswith(f"the tokenizer of {folder} needs custom code"), message
    assert "which is never run here; give a tokenizer without it" in message


def test_a_configs_code_is_never_run(folder: Path, tmp_path: Path) -> None:
    """`transformers` reads config.json of the folder of a tokenizer too."""
    save_tokenizer(folder)
    (folder / "tok_x.py").write_text(TOKENIZER.format(proof=str(tmp_path / "ran")))
    auto_map = {"AutoConfig": "tok_x.XConfig"}
    (folder / "config.json").write_text(json.dumps({"model_type": "x", "auto_map": auto_map}))
    assert len(load_extended(build_config(f"tokenizer_name_or_path={folder}"), "elsewhere")) == VOCAB_SIZE
    assert not (tmp_path / "ran").exists() and sys.stdin.read() == "y\n" * 9
