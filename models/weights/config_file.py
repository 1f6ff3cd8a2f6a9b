"""Reads config.json: the text model that it describes, and the model around it, if there is one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

from errors import UserError
from models.architecture.lookup import is_supported, unsupported
from models.layers.wrapped import Wrapper, unwrap
from models.storage.tensor_files import load_json
from models.weights.quantized import QUANTIZATION_CONFIG, parse_quantization


def load_config(path: Path, trust_remote_code: bool = False) -> tuple[PretrainedConfig, Wrapper | None]:
    """Return the text model's config as `transformers` reads it from config.json, and the model around it, if there is
    one. Custom code is never run: the layers come from `models/`.

    Raises UserError when the file is missing, unreadable, or points to custom code without `trust_remote_code`.
    """
    file = path / "config.json"
    if not file.is_file():
        below = " or ".join(sorted(str(found.parent) for found in path.glob("*/config.json")))
        hint = f"; did you mean {below}?" if below else ""
        raise UserError(
            f"{path} holds no config.json; it is neither a Hugging Face folder nor a pipeline checkpoint{hint}"
        )
    fields = load_json(file)
    if "auto_map" in fields and not trust_remote_code:
        raise UserError(
            f"{file} points to custom code ({', '.join(sorted(fields['auto_map']))}); "
            "check that it only repackages a known architecture, then give trust_remote_code=true "
            "(the other commands: --trust_remote_code)"
        )
    return parse_model(fields, file)


def parse_config(fields: dict[str, Any], file: Path) -> PretrainedConfig:
    """Return the config that `fields`, the content of `file`, describe. Raises UserError as `parse_model` does, and for
    a model around a text model."""
    text, wrapper = parse_model(fields, file)
    if wrapper is not None:
        raise UserError(
            f"{file}: model_type '{fields['model_type']}' wraps a text model, and only that is trained; give "
            f"model_type '{text.model_type}' and its fields, or the wrapped weights in model_name_or_path"
        )
    return text


def parse_model(fields: dict[str, Any], file: Path) -> tuple[PretrainedConfig, Wrapper | None]:
    """Return the config of the text model that `fields`, the content of `file`, describe, and the model around it, if
    there is one. Raises UserError for an unknown `model_type` or a bad value."""
    model_type = fields.get("model_type")
    if model_type not in CONFIG_MAPPING:
        raise UserError(f"{file}: {unsupported(model_type)}")
    parse_quantization(fields, file)  # the layers have dequantized weights: their config does not name it
    known = {key: value for key, value in fields.items() if key not in ("auto_map", QUANTIZATION_CONFIG)}
    try:
        config = AutoConfig.for_model(**known)
    except Exception as error:  # transformers validates with types of its own
        raise UserError(f"{file} is not a valid config of a '{model_type}': {' '.join(str(error).split())}") from None
    try:
        text, wrapper = unwrap(config)
    except UserError as error:
        raise UserError(f"{file}: {error}") from None
    if not is_supported(text):
        within = f" in a '{model_type}'" if wrapper is not None else ""
        raise UserError(f"{file}: {unsupported(text.model_type, within)}")
    return text, wrapper
