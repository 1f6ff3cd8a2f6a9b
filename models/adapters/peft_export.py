"""Write what peft loads: an adapter's config next to the checkpoints, and the folder of a trained adapter."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PretrainedConfig

from models.adapters.adapter import Adapter
from models.adapters.base_inits import describe_saved
from models.adapters.folder import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    BASE_FINGERPRINT,
    TIED_HEAD,
    name_for_peft,
    to_peft_name,
)
from models.layers.layer import Layer
from models.storage.folders import copy_model_files, copy_small_files, staged_folder


def save_adapter_config(adapter: Adapter, folder: Path, config: PretrainedConfig) -> None:
    """Write adapter_config.json into `folder`, as peft writes it for this model."""
    saved = name_for_peft(describe_saved(adapter.config), config)
    saved.peft_version = installed_peft()  # of an adapter that an older peft has written too: its stacks are restored
    saved.save_pretrained(str(folder))


def installed_peft() -> str:
    """Return the version of the installed peft, by whose order of stacks folders are written."""
    return version("peft")


def export_adapter(
    checkpoints: Path,
    tensors: Mapping[str, torch.Tensor],
    layers: Sequence[Layer],
    output_dir: Path,
    base_fingerprint: str | None = None,
    fields: Mapping[str, Any] | None = None,
) -> None:
    """Write a standard peft folder of a trained adapter, with the tokenizer and the other small files.

    checkpoints: the folder of the run's checkpoints, which has the adapter's config. tensors: by peft's names.
    base_fingerprint: of the model that the adapter belongs to. fields: of the adapter's config, in place of those in
    `checkpoints`.
    Raises UserError where `output_dir` cannot be written.
    """
    tensors = dict(tensors)
    fields = json.loads((checkpoints / ADAPTER_CONFIG).read_text()) if fields is None else fields
    embedding = tensors.get(to_peft_name("weight", layers[0]))
    if embedding is not None and not layers[-1].owns_weights:  # peft looks for a tied head under its own name too
        tensors[TIED_HEAD] = embedding.clone()
    with staged_folder(output_dir, overwrite=True) as folder:
        known = {} if base_fingerprint is None else {BASE_FINGERPRINT: base_fingerprint}
        save_file(tensors, folder.path / ADAPTER_WEIGHTS, metadata={"format": "pt", **known})
        copy_small_files(checkpoints, folder.path)
        copy_model_files(checkpoints, folder.path)
        for name in ("config.json", "generation_config.json"):  # as the tokenizer, perhaps not the base model's
            if (checkpoints / name).is_file():
                shutil.copyfile(checkpoints / name, folder.path / name)
        (folder.path / ADAPTER_CONFIG).write_text(json.dumps({**fields, "inference_mode": True}, indent=2) + "\n")
