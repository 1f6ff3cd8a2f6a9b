"""The fingerprint of a model: a hash of its content, the same wherever it lies.

It covers config.json (and an adapter's config, and an index) without the fields that name paths and versions, and
every tensor: its name, dtype and shape, and its bytes, whole up to 64 KiB, else a sample from its first byte to its
last. Of a file in a manifest it covers the hash of all bytes, with which they are compared when they are read. A model
in another form, converted or cut into other shards, has another fingerprint.

Version 1.1 sampled each file instead of each tensor (`fingerprint_as_1_1`), so that two models which differ in some
tensors alone could have one fingerprint. The two forms are never equal.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
import xxhash

from console import report_progress
from errors import UserError
from filesystem import hash_sample
from models.adapters.folder import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from models.storage.manifest import STATE_NAME, read_manifest
from models.storage.tensor_files import load_json, open_tensors
from models.weights.source import WeightSource

_PLACES = ("_name_or_path", "base_model_name_or_path", "revision", "transformers_version")
_INDEX_ENDING = ".index.json"
_FORM = "tensors:"  # begins a fingerprint; those of 1.1 are 32 hex digits alone
_WHOLE = 2**16  # bytes of the largest tensor that is hashed whole
_BLOCK = 2**13  # bytes of each block of a sample
_BYTES_PER_BLOCK = 2**22  # of a tensor, within these bounds:
_FEWEST_BLOCKS, _MOST_BLOCKS = 8, 64
# A tensor: its name, dtype and shape; its bytes; and what reads those from one place to another
Content = tuple[str, int, Callable[..., bytes | memoryview]]


def fingerprint_weights(source: WeightSource) -> str:
    """Return the fingerprint of a model in files. It reads at most 512 KiB of each tensor, whatever its size. Raises
    UserError for a file that cannot be read."""
    described = sorted(_describe(file) for file in source.files())
    return _FORM + hashlib.sha256(json.dumps(described).encode()).hexdigest()[:32]


def fingerprint_files(source: WeightSource) -> dict[Path, str]:
    """Return the fingerprint of each file of a model: of its header, and of its tensors as in `fingerprint_weights`.
    Raises UserError as that does."""
    return {file: fingerprint_file(file) for file in source.files()}


def fingerprint_file(file: Path) -> str:
    """Return the fingerprint of one file of a model. Raises UserError where it cannot be read."""
    return xxhash.xxh3_64_hexdigest(_describe(file).encode())


def fingerprint_as_1_1(source: WeightSource) -> str:
    """Return the fingerprint that version 1.1 stored, to compare with one of that form: equal ones prove less. Raises
    UserError as `fingerprint_weights` does."""
    described = sorted(_describe_as_1_1(file) for file in source.files() if not _is_new_since_1_1(file))
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()[:32]


def is_of_1_1(fingerprint: str) -> bool:
    """Return whether a stored fingerprint has the form of version 1.1."""
    return not fingerprint.startswith(_FORM)


def check_base(source: WeightSource, expected: str, adapter: Path) -> None:
    """Raise UserError where `source` is not the base model of the adapter in the folder `adapter`. expected: the
    fingerprint of that, of either form."""
    found = fingerprint_as_1_1(source) if is_of_1_1(expected) else fingerprint_weights(source)
    if found != expected:
        raise UserError(
            f"{adapter} holds an adapter of another base model than {source.path}: that has the fingerprint {found}, "
            f"it was trained on {expected}; write the right base_model_name_or_path into its {ADAPTER_CONFIG}, or "
            "accept this one with trust_checkpoint=true (the other commands: --trust_checkpoint)"
        )


def read_base_fingerprint(step_dir: Path) -> str | None:
    """Return the fingerprint of the base model that a LoRA run has saved with its checkpoint; None without one."""
    try:
        fingerprint = json.loads((step_dir / STATE_NAME).read_text())["identity"]["base model"]["fingerprint"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return fingerprint if isinstance(fingerprint, str) else None


def _describe(file: Path) -> str:
    report_progress()
    if file.suffix == ".json":
        return _describe_json(file)
    record = (read_manifest(file.parent) or {}).get(file.name)
    saved = "" if record is None else record.xxh3_128
    return f"{file.name} {file.stat().st_size} {_hash_header(file)} {saved} {_hash_tensors(file)}"


def _describe_as_1_1(file: Path) -> str:
    if file.suffix == ".json":
        return _describe_json(file)
    return f"{file.name} {file.stat().st_size} {_hash_header(file)} {hash_sample(file)}"


def _is_new_since_1_1(file: Path) -> bool:
    """Return whether the fingerprints of 1.1 left a file out: an index, and the config next to a peft adapter."""
    is_adapters = file.name == "config.json" and (file.parent / ADAPTER_WEIGHTS).is_file()
    return is_adapters or file.name.endswith(_INDEX_ENDING)


def _describe_json(file: Path) -> str:
    fields = {name: value for name, value in load_json(file).items() if name not in _PLACES}
    return f"{file.name} {json.dumps(fields, sort_keys=True)}"


def _hash_header(file: Path) -> str:
    return "" if file.suffix != ".safetensors" else hashlib.sha256(_read_header(file)).hexdigest()


def _read_header(file: Path) -> bytes:
    with open(file, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        return stream.read(length)


def _hash_tensors(file: Path) -> str:
    """Return the hash of name, dtype and shape of each tensor in a file, and of its bytes or a sample of them."""
    opened, digest = open_tensors(file), xxhash.xxh3_128()
    contents = _list_mapped(opened) if isinstance(opened, dict) else _list_safetensors(file)
    for described, num_bytes, read in contents:
        digest.update(described.encode())
        for start, stop in _choose_blocks(num_bytes):
            digest.update(read(start, stop))
    return digest.hexdigest()


def _list_mapped(tensors: Mapping[str, torch.Tensor]) -> Iterator[Content]:
    for name, tensor in sorted(tensors.items()):
        content = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
        yield f"{name} {tensor.dtype} {list(tensor.shape)}", len(content), lambda a, b, held=content: held[a:b]


def _list_safetensors(file: Path) -> Iterator[Content]:
    """Yield the tensors of a valid file. It is not read by its map: there the system reads up to some MiB ahead of each
    block, on many disks the whole file."""
    header = _read_header(file)
    fields = json.loads(header)
    fields.pop("__metadata__", None)
    with open(file, "rb", buffering=0) as stream:
        descriptor = stream.fileno()
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        for name, tensor in sorted(fields.items()):
            start, stop = (8 + len(header) + offset for offset in tensor["data_offsets"])
            read = lambda a, b, start=start: os.pread(descriptor, b - a, start + a)  # noqa: E731
            yield f"{name} {tensor['dtype']} {tensor['shape']}", stop - start, read


def _choose_blocks(num_bytes: int) -> list[tuple[int, int]]:
    """Return the first byte and the end of the blocks that are read of a tensor: evenly spaced, from its first byte to
    its last; all of a small one."""
    if num_bytes <= _WHOLE:
        return [(0, num_bytes)]
    blocks = min(max(num_bytes // _BYTES_PER_BLOCK, _FEWEST_BLOCKS), _MOST_BLOCKS)
    starts = [(num_bytes - _BLOCK) * number // (blocks - 1) for number in range(blocks)]
    return [(start, start + _BLOCK) for start in starts]
