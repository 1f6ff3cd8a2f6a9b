"""Reads config.json: the text model that it describes, and the model around it, if there is one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from errors import UserError
from models.architecture.lookup import SAME_CODE, is_supported, remove_undeclared, unsupported
from models.further.table import FURTHER_LAYERS, TRAINED
from models.layers.rope_scaling import name_for_version_4
from models.layers.wrapped import TEXT_CONFIG, Wrapper, unwrap
from models.storage.declared_sizes import check_least, find_rope_types
from models.storage.tensor_files import load_json
from models.weights.quantized import QUANTIZATION_CONFIG, parse_quantization

# They describe the files that were read, and not those that are written: the layers come from `models/`, dequantized
_OF_LOADED_FILES = ("auto_map", QUANTIZATION_CONFIG)
UNPADDED = "unpadded_vocab_size"  # how many rows a padded vocabulary uses
PASSTHROUGH_TENSORS = "passthrough_tensors"  # how many tensors the file next to config.json holds
_KEPT = (UNPADDED, PASSTHROUGH_TENSORS, TRAINED, *FURTHER_LAYERS)
DTYPE_KEYS = ("dtype", "torch_dtype")  # since transformers 4.56, and before


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
        named = fields["auto_map"]
        raise UserError(
            f"{file} points to custom code ({', '.join(sorted(named)) if isinstance(named, dict) else named}); "
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
    if not isinstance(model_type, str | None):
        raise UserError(f"{file}: model_type is {model_type!s:.40}, and must be a name; fetch the file again")
    named = fields.get("architectures")
    if named is not None and not (isinstance(named, list) and all(isinstance(name, str) for name in named)):
        raise UserError(f"{file}: architectures is {named!s:.40}, and must be a list of names; fetch the file again")
    model_type = SAME_CODE.get(model_type or "", model_type)
    if model_type not in CONFIG_MAPPING:
        raise UserError(f"{file}: {unsupported(model_type)}")
    parse_quantization(fields, file)  # the layers have dequantized weights: their config does not name it
    known = {key: value for key, value in fields.items() if key not in ("model_type", *_OF_LOADED_FILES)}
    try:
        config = AutoConfig.for_model(model_type, **known)
    except Exception as error:  # transformers validates with types of its own
        raise UserError(f"{file} is not a valid config of a '{model_type}': {' '.join(str(error).split())}") from None
    try:
        text, wrapper = unwrap(config)
    except UserError as error:
        raise UserError(f"{file}: {error}") from None
    check_least(text, file)
    for rope_type in find_rope_types(getattr(text, "rope_parameters", None)):
        if rope_type != "default" and (not isinstance(rope_type, str) or rope_type not in ROPE_INIT_FUNCTIONS):
            raise UserError(
                f"{file}: rope_type is {rope_type!s:.40}; transformers knows default, "
                f"{', '.join(sorted(ROPE_INIT_FUNCTIONS))}"
            )
    if not is_supported(text):
        within = f" in a '{model_type}'" if wrapper is not None else ""
        raise UserError(f"{file}: {unsupported(text.model_type, within)}")
    try:
        remove_undeclared(text, fields.get(TEXT_CONFIG, fields) if wrapper is not None else fields, _KEPT)
    except UserError as error:
        raise UserError(f"{file}: {error}") from None
    return text, wrapper


def describe_config(path: Path, config: PretrainedConfig) -> dict[str, Any]:
    """Return the content of a new config.json for the text model `config`, which was made from the model in `path`: the
    fields of its config.json with those that were changed, under the names of transformers 4 and 5. A folder without
    config.json is that of a new model."""
    file = path / "config.json"
    if not file.is_file():
        fields = text_fields = json.loads(config.to_json_string())
    else:
        own, wrapper = load_config(path, trust_remote_code=True)
        fields = load_json(file)
        text_fields = fields if wrapper is None else fields.get(TEXT_CONFIG, fields)
        before, after = own.to_dict(), config.to_dict()
        changed = {key: value for key, value in after.items() if before.get(key) != value}
        if "rope_parameters" in changed:
            for key in ("rope_theta", "rope_scaling", "partial_rotary_factor"):
                text_fields.pop(key, None)
        text_fields |= json.loads(json.dumps(changed, default=str))
        if getattr(config, UNPADDED, None) is None:  # larger than its padding since
            text_fields.pop(UNPADDED, None)
    for key in _OF_LOADED_FILES:
        fields.pop(key, None)
    if fields.get("model_type") in SAME_CODE:  # without the code that `auto_map` names, transformers could not read it
        fields["model_type"] = SAME_CODE[fields["model_type"]]
    name_for_version_4(text_fields, config)
    for level in (fields, text_fields):
        dtype = next((level[key] for key in DTYPE_KEYS if level.get(key) is not None), None)
        if dtype is not None:
            level |= dict.fromkeys(DTYPE_KEYS, dtype)
    return fields
