"""Model folders for tests: sources in every file format, conversions by path, and what `transformers` makes of a
folder."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from support.tiny import save_llama
from transformers import AutoModelForCausalLM

from models.architecture.lookup import build_layers
from models.conversion.convert import WriteOptions, convert_to_pipeline, export_hugging_face
from models.storage.safetensors_writer import INDEX_NAME
from models.weights.sources import open_weights

Tensors = dict[str, torch.Tensor]


_WRITE_OPTIONS = {field.name for field in fields(WriteOptions)}


def convert(source: Path, output: Path, **options: Any) -> Path:
    """options: the converter's, and those of `WriteOptions`."""
    write, others = _split(options)
    convert_to_pipeline(open_weights(str(source)), output, write, **others)
    return output


def export(source: Path, output: Path, **options: Any) -> Path:
    """options: the exporter's, and those of `WriteOptions`."""
    write, others = _split(options)
    export_hugging_face(open_weights(str(source)), output, write, **others)
    return output


def _split(options: dict[str, Any]) -> tuple[WriteOptions, dict[str, Any]]:
    write = {key: value for key, value in options.items() if key in _WRITE_OPTIONS}
    return WriteOptions(**write), {key: value for key, value in options.items() if key not in write}


def load_transformers(folder: Path) -> Tensors:
    """Returns the weights of the folder as `transformers` loads them, in their dtype."""
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    return model.state_dict()


def read_layers(folder: Path) -> Tensors:
    """Return the tensors of all layers, as a rank loads them."""
    source = open_weights(str(folder))
    layers = build_layers(source.config)
    source.check_complete(layers)
    return {
        layer.hf_prefix + name: tensor
        for index, layer in enumerate(layers)
        for name, tensor in source.read_layer(index, layer).items()
    }


def assert_same_bits(actual: Tensors, expected: Tensors) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype and torch.equal(actual[name], tensor), name


def save_source(folder: Path, kind: str, dtype: torch.dtype, **fields: Any) -> Tensors:
    """A model in the file format `kind`; returns its tensors as saved."""
    model = save_llama(folder, **fields).to(dtype)
    (folder / "model.safetensors").unlink()
    if kind == "safetensors":
        model.save_pretrained(folder)
    elif kind == "index":
        model.save_pretrained(folder, max_shard_size="60KB")
        assert (folder / INDEX_NAME).is_file()
    else:
        model.config.dtype = dtype
        model.config.save_pretrained(folder)
        torch.save(model.state_dict(), folder / "pytorch_model.bin", _use_new_zipfile_serialization=kind == "bin")
    return model.state_dict()
