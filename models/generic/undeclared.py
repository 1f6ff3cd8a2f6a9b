"""Fields of a config.json that the family's config class does not declare, such as a window in a Llama's: the model of
`transformers` usually ignores them, while code that all families share would obey them.

A family declares the fields that it reads by its config class. So the others are removed, for families with a file in
models/, once a small model of `transformers` that has them gives the same loss and gradients as layers without them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from typing import Any

from transformers import PretrainedConfig

from errors import UserError
from models.experts.grouped import GROUPED
from models.generic.proof import BOUND, compare
from models.generic.shrink import build_small, shrink
from models.layers.layer import Layer

BuildLayers = Callable[[PretrainedConfig], list[Layer]]

_proven: dict[str, str | None] = {}  # a config with all fields -> those that its layers lack and the model obeys


def remove_undeclared(
    config: PretrainedConfig,
    given: Collection[str],
    kept: Collection[str],
    build_layers: BuildLayers,
    kernels: Sequence[str],
) -> None:
    """Remove the fields that the class of `config` does not declare and that config.json has given.

    kept: names of fields that this project reads. build_layers, kernels: of the family. Raises UserError, naming the
    field, for one that the model of `transformers` obeys.
    """
    undeclared = find_undeclared(config, given, kept)
    if not undeclared:
        return
    key = config.to_json_string(use_diff=False)
    if key not in _proven:
        _proven[key] = _find_fault(config, undeclared, build_layers, kernels[0])
    if _proven[key] is not None:
        raise UserError(
            f"a '{config.model_type}' of transformers does something else with {_proven[key]}, which its config class "
            "does not declare; remove that field if the model was made without it, since it cannot be trained with it"
        )
    for name in undeclared:
        delattr(config, name)


def find_undeclared(config: PretrainedConfig, given: Collection[str], kept: Collection[str]) -> dict[str, Any]:
    """Return the fields of `given` that the class of `config` does not declare, with their values."""
    default = type(config)()
    declared = {field.name for field in fields(type(config))} | set(config.attribute_map)
    values = {name: value for name, value in vars(config).items() if name in given}
    return {
        name: value
        for name, value in values.items()
        if name not in declared and name not in kept and not hasattr(default, name)
    }


def _find_fault(
    config: PretrainedConfig, undeclared: Mapping[str, Any], build_layers: BuildLayers, kernel: str
) -> str | None:
    """Return the first field, or all of them together, that changes what the model computes; None where none does."""
    if _agrees(config, undeclared, build_layers, kernel):
        return None
    for name, value in undeclared.items():
        alone = copy.deepcopy(config)
        for other in undeclared.keys() - {name}:
            delattr(alone, other)
        if not _agrees(alone, {name: value}, build_layers, kernel):
            return f"{name}={value}"
    return ", ".join(f"{name}={value}" for name, value in undeclared.items())


def _agrees(config: PretrainedConfig, undeclared: Collection[str], build_layers: BuildLayers, kernel: str) -> bool:
    """Return whether layers without these fields give the loss and gradients of a small model of transformers that has
    them."""
    try:
        plain = shrink(config)
        plain._attn_implementation, plain._experts_implementation = kernel, "eager"
        small = copy.deepcopy(plain)
        small._experts_implementation = GROUPED
        for name in undeclared:
            delattr(small, name)
        return compare(build_layers(small), *build_small(plain), small)[0] < BOUND
    except Exception:  # other people's code, on a value that it was not made for
        return False
