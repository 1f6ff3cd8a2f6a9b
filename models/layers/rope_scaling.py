"""Rotary angles for lengths beyond those a model was trained at: `rope_parameters` of a run, put into the model's
config.

The names and formulas are those of `transformers` (`modeling_rope_utils`, 5.23): linear (2306.15595), dynamic NTK, yarn
(2309.00071), llama3 (2407.21783). Where a formula needs the length that the model was pretrained at, it is the model's
own `original_max_position_embeddings`, else its `max_position_embeddings`; and `max_position_embeddings` becomes
`factor` times that. So a model that has been stretched is unchanged by the same parameters.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from errors import UserError

DYNAMIC, LONG = "dynamic", "longrope"
BY_LENGTH = frozenset({DYNAMIC, LONG})  # types whose angles depend on the length of a document
_NEXT_TO_SCALING = ("rope_theta", "partial_rotary_factor")  # within `rope_parameters` since transformers 5
_COMMON_FIELDS = frozenset({"rope_type", "factor", "rope_theta"})
_LENGTH = "original_max_position_embeddings"
# type -> required fields, and all that it may have
_FIELDS: dict[str, tuple[tuple[str, ...], frozenset[str]]] = {
    "linear": (("factor",), _COMMON_FIELDS),
    DYNAMIC: (("factor",), _COMMON_FIELDS),
    "yarn": (
        ("factor",),
        _COMMON_FIELDS
        | {_LENGTH, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"},
    ),
    "llama3": (
        ("factor", "low_freq_factor", "high_freq_factor"),
        _COMMON_FIELDS | {_LENGTH, "low_freq_factor", "high_freq_factor"},
    ),
}


def stretch_positions(config: PretrainedConfig, given: Mapping[str, Any]) -> None:
    """Change `rope_parameters` and `max_position_embeddings` of `config`; does nothing where nothing is given.

    given: as in a Hugging Face config.json. The base `rope_theta` and the share of a head that is rotated are the
    model's, unless given. Raises UserError for a field that is missing, unknown or out of range, and for a model
    without rotary positions, or with several kinds of them.
    """
    if not given:
        return
    check_fields(given)
    own = _get_own(config)
    pretrained = int(given.get(_LENGTH) or _find_pretrained_length(config, own))
    kept = {key: own[key] for key in ("rope_theta", "partial_rotary_factor") if own.get(key) is not None}
    stretched = {**kept, **given}
    if _LENGTH in _FIELDS[given["rope_type"]][1]:
        stretched[_LENGTH] = pretrained
        if hasattr(config, _LENGTH):  # takes precedence over the one among the parameters
            setattr(config, _LENGTH, pretrained)
    # The angles of "dynamic" depend on the ratio of a sequence's length to the model's own, which therefore stays
    scale = 1.0 if given["rope_type"] == DYNAMIC else given["factor"]
    config.rope_parameters = stretched
    config.max_position_embeddings = round(scale * pretrained)
    config.standardize_rope_params()


def name_for_version_4(fields: dict[str, Any], config: PretrainedConfig) -> None:
    """Put the rotary positions of `config` into the content of its config.json, under the names of transformers 5
    (`rope_parameters`) and of transformers 4 (`rope_theta`, `partial_rotary_factor`, `rope_scaling`), unless it has
    those already. A model with several sets of parameters keeps its own fields: version 4 has no common names for them.
    """
    rope = getattr(config, "rope_parameters", None)
    if not rope or any(isinstance(value, dict) for value in rope.values()):
        return
    fields["rope_parameters"] = dict(rope)
    if any(fields.get(key) is not None for key in ("rope_theta", "rope_scaling")):
        return
    scaling = {key: value for key, value in rope.items() if key not in (*_NEXT_TO_SCALING, "rope_type", "type")}
    if fields.get(_LENGTH) is not None:
        scaling.pop(_LENGTH, None)  # Phi-3's config of version 4 refuses a field more
    fields |= {key: rope[key] for key in _NEXT_TO_SCALING if rope.get(key) is not None}
    rope_type = rope["rope_type"]
    key = "type" if rope_type == LONG else "rope_type"  # Phi-3's config of version 4 asks for the older name
    fields["rope_scaling"] = None if rope_type == "default" else {key: rope_type, **scaling}


def copy_positions(source: PretrainedConfig, target: PretrainedConfig) -> None:
    """Copy the fields that `stretch_positions` may have changed from one config of a model to another."""
    for name in ("rope_parameters", "max_position_embeddings", _LENGTH):
        if hasattr(target, name) and hasattr(source, name):
            setattr(target, name, copy.deepcopy(getattr(source, name)))


def depends_on_length(config: PretrainedConfig) -> bool:
    """Return whether angles depend on the length of a document, not on positions alone."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(each for each in rope.values() if isinstance(each, dict))]
    return any(kind.get("rope_type") in BY_LENGTH for kind in kinds)


def find_length_limit(config: PretrainedConfig) -> tuple[int, bool]:
    """Return the length of documents up to which angles depend on positions alone, and whether all longer ones have the
    same frequencies. For a config whose angles depend on the length."""
    rope = config.rope_parameters
    kinds = [kind for kind in (rope, *rope.values()) if isinstance(kind, dict) and kind.get("rope_type") in BY_LENGTH]
    limits = [
        kind.get(_LENGTH) or config.max_position_embeddings
        if kind["rope_type"] == LONG
        else config.max_position_embeddings
        for kind in kinds
    ]
    return int(min(limits)), all(kind["rope_type"] == LONG for kind in kinds)


def check_fields(given: Mapping[str, Any]) -> None:
    """Check the fields that can be checked without the model. Raises UserError."""
    types = ", ".join(_FIELDS)
    rope_type = given.get("rope_type")
    if rope_type not in _FIELDS:
        raise UserError(f"rope_parameters.rope_type={rope_type or 'null'}: must be one of {types}")
    required, known = _FIELDS[rope_type]
    if missing := [key for key in required if given.get(key) is None]:
        names = " and ".join(f"rope_parameters.{key}" for key in missing)
        raise UserError(f"rope_parameters.rope_type={rope_type} needs {names}; give {'them' if missing[1:] else 'it'}")
    for key, value in given.items():
        if key not in known:
            raise UserError(
                f"rope_parameters.{key} is not a field of rope_type={rope_type}; it has {', '.join(sorted(known))}"
            )
        if key not in ("rope_type", "truncate") and not _is_positive(value):
            raise UserError(f"rope_parameters.{key}={value}: a number of more than 0")
    if given["factor"] < 1:
        raise UserError(f"rope_parameters.factor={given['factor']}: at least 1, how many times as long")
    if rope_type == "llama3" and given["low_freq_factor"] >= given["high_freq_factor"]:
        raise UserError(
            f"rope_parameters.low_freq_factor={given['low_freq_factor']}: less than "
            f"rope_parameters.high_freq_factor={given['high_freq_factor']}"
        )


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _get_own(config: PretrainedConfig) -> dict[str, Any]:
    """Return the model's one set of parameters. Raises UserError where it has none, or several."""
    own = getattr(config, "rope_parameters", None)
    if not own or not getattr(config, "max_position_embeddings", None):
        raise UserError(f"rope_parameters: a '{config.model_type}' has no rotary positions; omit it")
    if any(isinstance(value, dict) for value in own.values()):
        raise UserError(
            f"rope_parameters: a '{config.model_type}' has several, one for each type of its layers "
            f"({', '.join(own)}), and a run gives one; omit it, and change them in its config.json"
        )
    return own


def _find_pretrained_length(config: PretrainedConfig, own: Mapping[str, Any]) -> float:
    if own.get(_LENGTH):
        return own[_LENGTH]
    length: int = config.max_position_embeddings
    return length / own["factor"] if own.get("rope_type") == "linear" else length
