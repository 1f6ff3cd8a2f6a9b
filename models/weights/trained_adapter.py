"""The adapter in a training checkpoint: read for an export or a reference, and compared when a run is resumed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from errors import UserError
from models.adapters.adapter import Adapter
from models.adapters.base_inits import describe_saved
from models.adapters.folder import ADAPTER_CONFIG, fold_weights, load_lora_config, to_peft_name
from models.layers.layer import Layer
from models.weights.pipeline_checkpoint import PipelineCheckpoint

if TYPE_CHECKING:
    from peft import LoraConfig  # imported on use: peft takes seconds


def read_trained_adapter(
    step_dir: Path, layers: Sequence[Layer], trust_checkpoint: bool = False
) -> dict[str, torch.Tensor]:
    """Returns the adapter's tensors that a LoRA run has saved in `step_dir`, by peft's names. Raises UserError for a
    file that cannot be read or is damaged, and without `trust_checkpoint` for a checkpoint without a manifest."""
    checkpoint = PipelineCheckpoint(step_dir.parent, step_dir.name, trust_checkpoint)
    tensors: dict[str, torch.Tensor] = {}
    for index, layer in enumerate(layers):
        if layer.owns_weights:
            parameters = checkpoint.read_parameters(index)
            tensors |= {to_peft_name(name, layer): tensor.contiguous() for name, tensor in parameters.items()}
    return tensors


def check_same_adapter(adapter: Adapter | None, resume_from: Path | None) -> None:
    """Raises UserError when a run would continue from a checkpoint with another adapter than its own, or with none."""
    if resume_from is None:
        return
    saved_with = (resume_from.parent / ADAPTER_CONFIG).is_file()
    if saved_with != (adapter is not None):
        saved, now = ("adapter=lora", "adapter=none") if saved_with else ("adapter=none", "adapter=lora")
        raise UserError(
            f"resume: {resume_from} was saved with {saved}, this run has {now}; give {saved}, or start a new run"
        )
    if adapter is None:
        return
    saved_config = load_lora_config(resume_from.parent)
    before, after = _describe_resumed(saved_config), _describe_resumed(describe_saved(adapter.config))
    for key, value in before.items():
        if value != after[key]:
            raise UserError(
                f"resume: adapter.{key} was {_show(value)}, is {_show(after[key])}; give the same, or start a new run"
            )


def _describe_resumed(lora: LoraConfig) -> dict[str, object]:
    """Returns the fields that must stay the same when a run is resumed."""
    modules, parameters = fold_weights(lora)
    same = {key: getattr(lora, key) for key in ("r", "lora_alpha", "use_rslora", "use_dora")}
    same["modules_to_save"] = sorted(lora.modules_to_save or ())
    return {**same, "target_modules": modules, "target_parameters": parameters}


def _show(value: object) -> object:
    return f"[{','.join(sorted(value))}]" if isinstance(value, (set, list)) else value
