"""The files next to the checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from support.configs import build_config
from support.tiny import save_llama, save_tokenizer
from transformers import AutoTokenizer

from models.weights.sources import open_weights
from training.checkpoint.run_folder import RunFolder
from training.export import prepare_folder


def test_a_model_gets_the_end_token_of_the_tokenizer_that_it_is_trained_with(tmp_path: Path) -> None:
    save_llama(tmp_path / "hf")
    save_tokenizer(tmp_path / "hf")
    names = ("config.json", "generation_config.json")
    for file in (tmp_path / "hf" / name for name in names):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": 3}))
    tokenizer, folder = AutoTokenizer.from_pretrained(tmp_path / "hf"), RunFolder(tmp_path / "out")
    source = open_weights(str(tmp_path / "hf"))
    setup: Any = SimpleNamespace(source=source, architecture=source.config, adapter=None)
    prepare_folder(build_config(), setup, tokenizer, folder)
    for name in names:
        assert json.loads((folder.checkpoints / name).read_text())["eos_token_id"] == [3, tokenizer.eos_token_id]
