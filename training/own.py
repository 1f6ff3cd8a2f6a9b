"""One's own code in a run: what `_target_` names in `data.encoder`, `data.collator` and `loss` (docs/add_your_data.md)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import is_dataclass
from typing import Any

from transformers import PretrainedConfig

from data.collator import Checked, Collator, PadRight
from data.sample import Encoder
from data.targets import TARGET, build_target
from errors import UserError
from models.cuts import ALONE, TensorParallel
from models.loss import Loss
from training.config import DataConfig, RunConfig, Task, get_task
from training.preferences import build_dpo_loss


def build_own_encoder(data: DataConfig) -> Encoder:
    """Raises UserError for what is no encoder."""
    fits = lambda encoder: callable(getattr(encoder, "encode", None)) and is_dataclass(encoder)  # noqa: E731
    return _build(
        data.encoder, "data.encoder", "my_data.MyEncoder", fits,
        "a dataclass with a method encode(record, location, tokenizer); its fields are part of the cache's key",
    )  # fmt: skip


def build_collator(data: DataConfig) -> Collator:
    """What makes tensors of rows: right padding, or one's own. Raises UserError for what is no collator."""
    if data.collator is None:
        return PadRight()
    fits = lambda collator: all(callable(getattr(collator, name, None)) for name in ("collate_inputs", "collate_labels"))  # noqa: E731
    need = "a class with the methods collate_inputs and collate_labels of data.collator.Collator"
    return Checked(_build(data.collator, "data.collator", "my_data.MyCollator", fits, need), f"data.collator {data.collator[TARGET]}")


def build_run_loss(config: RunConfig, model_config: PretrainedConfig, parallel: TensorParallel = ALONE) -> Loss | None:
    """The loss of the run's last stage: one's own, or that of its task; None for the model's own cross entropy. parallel: who shares the head.

    Raises UserError for what is no loss.
    """
    if config.loss is None:
        return build_dpo_loss(config, model_config, parallel)
    if get_task(config) is Task.dpo:
        raise UserError("loss and task=dpo: each is a loss; give one of them")
    return _build(config.loss, "loss", "my_losses.MyLoss", callable, "a class whose objects are called with (outputs, targets)")


def _build(spec: Any, key: str, example: str, fits: Callable[[Any], bool], need: str) -> Any:
    if not isinstance(spec, dict):
        raise UserError(f"{key}={spec}: give a mapping, such as {{_target_: {example}, field: value}}")
    built = build_target({TARGET: None, **spec}, key)
    if not fits(built):
        raise UserError(f"{key}: {spec[TARGET]} must be {need}")
    return built
