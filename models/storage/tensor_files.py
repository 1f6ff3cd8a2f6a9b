"""Opens files of weights and JSON: memory-mapped, never unpickling anything but tensors, with errors that name the
file."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from errors import UserError


def _read_object(fields: dict[str, Any]) -> Any:
    """Decode numbers that JSON lacks: `transformers` writes {"__float__": "Infinity"} (5.23)."""
    return float(fields["__float__"]) if fields.keys() == {"__float__"} else fields


def load_json(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises UserError when the file is something else or half-written."""
    _check_regular(file)
    try:
        fields = json.loads(file.read_text(encoding="utf-8"), object_hook=_read_object)
    except json.JSONDecodeError as error:
        raise UserError(
            f"{file} is not valid JSON (line {error.lineno}: {error.msg}); it may be half-written"
        ) from None
    except RecursionError:
        raise UserError(f"{file} cannot be read (its objects are nested too deeply)") from None
    except (OSError, ValueError) as error:  # not UTF-8, or a number of thousands of digits
        raise UserError(f"{file} cannot be read ({error})") from None
    if not isinstance(fields, dict):
        raise UserError(f"{file} holds a JSON {type(fields).__name__} instead of an object")
    return fields


def open_tensors(file: Path) -> safe_open | dict[str, torch.Tensor]:
    """Return a mapping of tensors: `safe_open` for safetensors, a dict for .bin."""
    return open_safetensors(file) if file.suffix == ".safetensors" else load_torch_file(file)


def list_shapes(files: Iterable[Path]) -> list[torch.Size]:
    """Return the shapes of all tensors in safetensors files, by their headers alone. Raises UserError for a damaged
    file."""
    opened = [open_safetensors(file) for file in files]
    return [torch.Size(file.get_slice(name).get_shape()) for file in opened for name in file.keys()]


def open_safetensors(file: Path) -> safe_open:
    """Return the file, memory-mapped. Raises UserError when it is damaged."""
    _check_permission(file)
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file} cannot be read ({error}); it is truncated or not a safetensors file") from None


def load_torch_file(file: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a .pt or .bin file, memory-mapped where its format allows, never unpickling anything but
    tensors. Raises UserError when it is missing or damaged."""
    if not file.is_file():
        raise UserError(f"{file} is missing; the checkpoint is incomplete")
    _check_permission(file)
    try:
        try:
            tensors = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
        except RuntimeError as error:
            if "mmap can only be used" not in str(error):  # files older than torch 1.6 are not zip archives
                raise
            tensors = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises half a dozen types for a damaged file
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{file} cannot be read ({reason}); it is half-written or not a checkpoint") from None
    if not isinstance(tensors, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in tensors.values()):
        raise UserError(f"{file} holds something other than named tensors; it is not a file of weights")
    return tensors


def _check_regular(file: Path) -> None:
    """Raise UserError for what is there and is no file, such as a pipe, which would be waited for."""
    if file.exists() and not file.is_file():
        raise UserError(f"{file} is not a regular file; put the file itself there")


def _check_permission(file: Path) -> None:
    """Raise PermissionError, which the libraries report as another error (safetensors 0.8.0: no such file)."""
    _check_regular(file)
    with suppress(FileNotFoundError), open(file, "rb"):
        pass
