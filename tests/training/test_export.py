"""The files next to the checkpoints."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.adapters import build_lora
from support.configs import build_config
from support.tiny import save_llama, save_tokenizer
from transformers import AutoTokenizer

from models.architecture.lookup import build_layers
from models.weights.sources import open_weights
from training.checkpoint.run_folder import RunFolder
from training.export import prepare_folder


def test_a_model_stops_at_the_tokens_that_it_is_trained_to_stop_at(tmp_path: Path) -> None:
    save_llama(tmp_path / "hf")
    save_tokenizer(tmp_path / "hf")
    names = ("config.json", "generation_config.json")
    for file in (tmp_path / "hf" / name for name in names):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": 3}))
    tokenizer, folder = AutoTokenizer.from_pretrained(tmp_path / "hf"), RunFolder(tmp_path / "out")
    source = open_weights(str(tmp_path / "hf"))
    setup: Any = SimpleNamespace(source=source, architecture=source.config, adapter=None)
    prepare_folder(build_config(), setup, tokenizer, folder, stop_tokens=["<s>", "</s>"])
    for name in names:
        assert json.loads((folder.checkpoints / name).read_text())["eos_token_id"] == [3, tokenizer.eos_token_id, 1]


@pytest.mark.parametrize("is_adapter", [False, True])
def test_files_that_all_checkpoints_share_are_replaced_whole_and_only_when_they_differ(
    is_adapter: bool, tmp_path: Path
) -> None:
    save_llama(tmp_path / "hf")
    save_tokenizer(tmp_path / "hf")
    tokenizer, folder = AutoTokenizer.from_pretrained(tmp_path / "hf"), RunFolder(tmp_path / "out")
    source = open_weights(str(tmp_path / "hf"))
    adapter = build_lora(build_layers(source.config)) if is_adapter else None
    setup: Any = SimpleNamespace(source=source, architecture=source.config, adapter=adapter)
    prepare_folder(build_config(), setup, tokenizer, folder)
    files = {file.name: file for file in folder.checkpoints.iterdir()}
    assert {"tokenizer.json", "config.json"} <= set(files) and ("adapter_config.json" in files) == is_adapter
    places = {name: (file.stat().st_ino, file.stat().st_mtime_ns) for name, file in files.items()}
    prepare_folder(build_config(), setup, tokenizer, folder)
    assert {file.name: (file.stat().st_ino, file.stat().st_mtime_ns) for file in folder.checkpoints.iterdir()} == places
    before = {name: file.read_bytes() for name, file in files.items()}
    for name, file in files.items():
        os.link(file, tmp_path / name)
        file.write_text("half")  # through the link too
    prepare_folder(build_config(), setup, tokenizer, folder)
    for name, content in before.items():
        assert files[name].read_bytes() == content
        assert (tmp_path / name).read_text() == "half"  # another file has taken its name
    assert set(files) == {file.name for file in folder.checkpoints.iterdir()}
