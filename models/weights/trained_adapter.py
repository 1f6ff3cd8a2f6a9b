"""The adapter in a training checkpoint: read for an export or a reference, and compared when a run is resumed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from errors import UserError
from models.adapters.adapter import Adapter
from models.adapters.base_inits import describe_trained
from models.adapters.folder import ADAPTER_CONFIG, fold_weights, load_lora_config, to_peft_name
from models.adapters.options import starts_from_base
from models.layers.layer import Layer
from models.weights.pipeline_checkpoint import PipelineCheckpoint

if TYPE_CHECKING:
    from peft import LoraConfig  # imported on use: peft takes seconds


_PATTERNS = ("rank_pattern", "alpha_pattern")  # ranks and scales by name, which the folder of an adapter may have


def read_trained_adapter(
    step_dir: Path,
    layers: Sequence[Layer],
    trust_checkpoint: bool = False,
    restore: Callable[[Layer, dict[str, torch.Tensor]], dict[str, torch.Tensor]] | None = None,
) -> dict[str, torch.Tensor]:
    """Returns the adapter's tensors that a LoRA run has saved in `step_dir`, by peft's names. restore: maps a layer's
    tensors as they were saved, by their names in its module, to those that are returned.

    Raises UserError for a file that cannot be read or is damaged, and without `trust_checkpoint` for a checkpoint
    without a manifest."""
    checkpoint = PipelineCheckpoint(step_dir.parent, step_dir.name, trust_checkpoint)
    tensors: dict[str, torch.Tensor] = {}
    for index, layer in enumerate(layers):
        if layer.owns_weights:
            parameters = checkpoint.read_parameters(index)
            parameters = parameters if restore is None else restore(layer, parameters)
            tensors |= {to_peft_name(name, layer): tensor.contiguous() for name, tensor in parameters.items()}
    return tensors


def check_same_adapter(adapter: Adapter | None, resume_from: Path | None, saved_init: str = "true") -> None:
    """Raises UserError when a run would continue from a checkpoint with another adapter than its own, or with none.

    saved_init: `adapter.init_lora_weights` of the run that saved it, where that starts from the base weights: its files
    have twice the rank.
    """
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
    saved_config = describe_trained(load_lora_config(resume_from.parent), saved_init)
    before, after = _describe_resumed(saved_config), _describe_resumed(adapter.config)
    for key, value in before.items():
        if value != after[key]:
            remedy = "; adapter.name_or_path gives such an adapter" if key in _PATTERNS else ""
            raise UserError(
                f"resume: adapter.{key} was {_show(value)}, is {_show(after[key])}; give the same, or start a new run"
                f"{remedy}"
            )


def _describe_resumed(lora: LoraConfig) -> dict[str, object]:
    """Returns the fields that must stay the same when a run is resumed."""
    modules, parameters = fold_weights(lora)
    init = lora.init_lora_weights  # others do not matter once there are weights
    same: dict[str, object] = {"init_lora_weights": init if starts_from_base(init) else True}
    same |= {key: getattr(lora, key) for key in ("r", "lora_alpha", "use_rslora", "use_dora")}
    same["modules_to_save"] = sorted(lora.modules_to_save or ())
    same |= {key: dict(sorted((getattr(lora, key) or {}).items())) for key in _PATTERNS}
    return {**same, "target_modules": modules, "target_parameters": parameters}


def _show(value: object) -> object:
    if isinstance(value, (set, list)):
        return f"[{','.join(sorted(value))}]"
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else value
