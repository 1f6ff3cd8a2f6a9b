"""User-defined components: the `_target_` of `data.encoder`, `data.collator` and `callbacks`.

docs/add_your_data.md and docs/configure.md show how to write one.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import is_dataclass
from typing import Any

from data.collator import Checked, Collator, PadRight
from data.components import TARGET, build_checked_component
from data.sample import Encoder
from errors import UserError
from training.config.schema import DataConfig

CALLBACK_METHODS = ("on_step", "on_evaluate", "on_save", "on_end")
COLLATOR_METHODS = ("collate_inputs", "collate_labels")


def build_user_encoder(data: DataConfig) -> Encoder:
    """Build the encoder that `data.encoder` names. Raises UserError for an object that is not an encoder."""
    fits = lambda encoder: callable(getattr(encoder, "encode", None)) and is_dataclass(encoder)  # noqa: E731
    need = "a dataclass with a method encode(record, location, tokenizer); its fields are part of the cache's key"
    return build_checked_component(data.encoder, "data.encoder", example="my_data.MyEncoder", fits=fits, need=need)


def build_collator(data: DataConfig, num_workers: int) -> Collator:
    """Build the collator: right padding, or the one that `data.collator` names. Raises UserError for an object that is
    not a collator, or that cannot be sent to worker processes where there are some."""
    if data.collator is None:
        return PadRight()
    fits = lambda collator: all(callable(getattr(collator, name, None)) for name in COLLATOR_METHODS)  # noqa: E731
    need = "a class with the methods collate_inputs and collate_labels of data.collator.Collator"
    collator = build_checked_component(
        data.collator, "data.collator", example="my_data.MyCollator", fits=fits, need=need
    )
    name = f"data.collator {data.collator[TARGET]}"
    if num_workers:
        try:
            pickle.dumps(collator)
        except Exception as error:  # whatever its own code raises
            raise UserError(
                f"{name} cannot be sent to worker processes ({error}); keep lambdas, open files and the like out of "
                "its attributes, or give num_workers=0"
            ) from error
    return Checked(collator, name)


def build_callbacks(callbacks: Sequence[Any]) -> list[tuple[str, Any]]:
    """Build the objects of the key `callbacks`, each with its name for messages. Raises UserError for an object that
    is not a callback."""
    need = f"a class with methods of {', '.join(CALLBACK_METHODS)}, and no other on_..."
    built = []
    for number, spec in enumerate(callbacks, start=1):
        key, example = f"callbacks, entry {number}", "my_callbacks.MyCallback"
        callback = build_checked_component(spec, key, example=example, fits=_is_callback, need=need)
        built.append((spec[TARGET], callback))
    return built


def _is_callback(built: Any) -> bool:
    named = {name for name in dir(built) if name.startswith("on_") and callable(getattr(built, name))}
    return bool(named) and named <= set(CALLBACK_METHODS)
