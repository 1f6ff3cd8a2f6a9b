"""A model is known by its content: wherever it lies, and whatever the times of its files."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.adapters import make_adapter
from support.tiny import save_llama

from errors import UserError
from models.adapters.folder import BASE_FINGERPRINT
from models.weights.fingerprint import fingerprint_as_1_1, fingerprint_weights
from models.weights.source import WeightSource
from models.weights.sources import open_weights

IN_HEADER = 0


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save_llama(tmp_path / "model", num_hidden_layers=1)
    return tmp_path / "model"


def fingerprint(path: Path) -> str:
    return fingerprint_weights(open_weights(str(path)))


def test_a_copy_elsewhere_is_the_same_model(model: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(model, tmp_path / "elsewhere" / "copy"))
    fields = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(fields | {"_name_or_path": "somewhere"}, indent=7))
    os.utime(copy / "model.safetensors", (1, 1))
    assert fingerprint(copy) == fingerprint(model)


@pytest.mark.parametrize("place", [IN_HEADER, -1, 100_000])
def test_another_byte_of_the_weights_is_another_model(model: Path, place: int) -> None:
    before, file = fingerprint(model), model / "model.safetensors"
    content = bytearray(file.read_bytes())
    if place == IN_HEADER:
        content = bytearray(content.replace(b'"format":"pt"', b'"format":"tp"'))
    else:
        content[place] ^= 1
    file.write_bytes(content)
    assert fingerprint(model) != before


def test_another_config_is_another_model(model: Path) -> None:
    before, file = fingerprint(model), model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rms_norm_eps": 1e-3}))
    assert fingerprint(model) != before


def test_an_adapter_counts_and_the_path_of_its_base_does_not(model: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    make_adapter(adapter, model)
    before = fingerprint(adapter)
    assert before != fingerprint(model)
    moved = model.rename(tmp_path / "moved")
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": str(moved)}))
    assert fingerprint(adapter) == before


@pytest.mark.parametrize("form", [fingerprint_weights, fingerprint_as_1_1])
def test_an_adapter_is_merged_into_its_own_base_alone(
    model: Path, tmp_path: Path, form: Callable[[WeightSource], str]
) -> None:
    adapter = tmp_path / "adapter"
    make_adapter(adapter, model)
    file = adapter / "adapter_model.safetensors"
    known = {"format": "pt", BASE_FINGERPRINT: form(open_weights(str(model)))}
    save_file(load_file(file), file, metadata=known)
    open_weights(str(adapter))
    save_llama(model, num_hidden_layers=1, seed=1)
    with pytest.raises(UserError, match=f"{adapter} holds an adapter of another base model than {model}: that has the"):
        open_weights(str(adapter))
    open_weights(str(adapter), trust_checkpoint=True)


def test_only_the_sample_is_read_from_the_disk(model: Path) -> None:
    """Disks whose readahead is some MiB would give the whole file to its map."""
    file, size = model / "model.safetensors", 2**25
    save_file({"weight": torch.zeros(size, dtype=torch.uint8)}, file, metadata={"format": "pt"})
    source = open_weights(str(model))
    with open(file, "rb") as stream:
        os.fdatasync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    before = psutil.Process().io_counters().read_bytes
    fingerprint_weights(source)
    assert psutil.Process().io_counters().read_bytes - before < size / 4
