"""The fingerprint of a model: a hash of its content, the same wherever it lies.

It covers config.json (and an adapter's config) without the fields that name paths and versions; of each file of weights
its size, a safetensors header whole, and a sample of its bytes (see `filesystem.hash_sample`). A model in another form,
converted or cut into other shards, has another fingerprint.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from filesystem import hash_sample
from models.storage.tensor_files import load_json
from models.weights.source import WeightSource

_PLACES = ("_name_or_path", "base_model_name_or_path", "revision", "transformers_version")


def fingerprint_weights(source: WeightSource) -> str:
    """Return the fingerprint of a model in files, 32 hex digits. It reads at most a few MiB of each file, whatever
    their sizes."""
    described = sorted(_describe(file) for file in source.files())
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()[:32]


def _describe(file: Path) -> str:
    if file.suffix == ".json":
        fields = {name: value for name, value in load_json(file).items() if name not in _PLACES}
        return f"{file.name} {json.dumps(fields, sort_keys=True)}"
    return f"{file.name} {file.stat().st_size} {_hash_header(file)} {hash_sample(file)}"


def _hash_header(file: Path) -> str:
    if file.suffix != ".safetensors":
        return ""
    with open(file, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        return hashlib.sha256(stream.read(length)).hexdigest()
