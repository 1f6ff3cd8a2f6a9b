"""Writes the other files of a converted model's folder: tokenizer, generation_config.json, config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from models.conversion.converted import ConvertedWeights
from models.layers.wrapped import TEXT_CONFIG
from models.storage.folders import StagedFolder, copy_model_files, copy_small_files
from models.storage.tensor_files import load_json
from models.weights.config_file import DTYPE_KEYS, UNPADDED, describe_config
from models.weights.quantized import QUANTIZATION_CONFIG
from models.weights.vocabulary import SpecialTokens, update_token_ids


def write_model_files(
    folder: StagedFolder,
    weights: ConvertedWeights,
    tokenizer: PreTrainedTokenizerBase | None = None,
    tokens: SpecialTokens | None = None,
    is_pipeline: bool = False,
) -> None:
    """Write the tokenizer, generation_config.json and config.json: the source's, with the changes of the conversion.
    Without config.json a folder is not a model, so it is written last. is_pipeline: of a pipeline checkpoint."""
    source_dir, config_dir = weights.source.path, weights.source.config_dir
    fields = describe_config(config_dir, weights.config)
    text_fields = fields.get(TEXT_CONFIG, fields) if weights.source.wrapper is not None else fields
    for described in (fields, text_fields):
        _set_dtype(described, weights.dtypes)
    if any(
        getattr(weights.config, key, None) != getattr(weights.source.config, key, None)
        for key in ("vocab_size", UNPADDED)
    ):
        text_fields["vocab_size"] = weights.config.vocab_size
        text_fields[UNPADDED] = getattr(weights.config, UNPADDED, text_fields["vocab_size"])
    if text_fields.get(UNPADDED) == text_fields.get("vocab_size"):
        text_fields.pop(UNPADDED, None)
    if weights.quantization is not None:
        fields[QUANTIZATION_CONFIG] = weights.quantization
    weights.passthrough.update_config(fields, weights.source.config, is_pipeline)
    generation_file = config_dir / "generation_config.json"
    generation_fields = load_json(generation_file) if generation_file.is_file() else None
    if tokenizer is not None and tokens is not None:
        for described in (fields, text_fields):
            update_token_ids(described, tokenizer, tokens)
        if generation_fields is not None:
            update_token_ids(generation_fields, tokenizer, tokens)
        tokenizer.save_pretrained(folder.path)
    copy_small_files(source_dir, folder.path, with_tokenizer=tokenizer is None)
    copy_small_files(config_dir, folder.path, with_tokenizer=False)
    copy_model_files(source_dir, folder.path)
    if generation_fields is not None:
        write_json(generation_fields, folder.path / generation_file.name)
    write_json(fields, folder.path / "config.json")


def _set_dtype(fields: dict[str, Any], dtypes: set[torch.dtype]) -> None:
    """Set config.json's dtype to the weights': transformers loads into the dtype it finds there."""
    if len(dtypes) == 1:
        fields |= dict.fromkeys(DTYPE_KEYS, str(next(iter(dtypes))).removeprefix("torch."))


def write_json(fields: dict[str, Any], file: Path) -> None:
    """Write `fields` as the other files of a Hugging Face folder are written: UTF-8, indented by two."""
    file.write_text(json.dumps(fields, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
