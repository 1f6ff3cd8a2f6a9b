"""The JSON Schema of a run's config, for editors: types and ranges from the schema, defaults and meanings from `conf/`.

It is that of a file which `-cn` picks, and leaves out what only Hydra knows: which choices a group has, and
interpolations in place of numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import yaml

from training.config.key_table import Key, list_groups, list_keys
from training.config.ranges import find_range
from training.config.schema import build_schema

JsonSchema = dict[str, Any]
_SCALARS = {int: "integer", float: "number", str: "string", bool: "boolean", NoneType: "null"}
_OF_HYDRA: JsonSchema = {
    "defaults": {"type": "array", "description": "base, or the config that this one builds on; _self_; groups"},
    "hydra": {"type": "object"},
}


def build_json_schema() -> JsonSchema:
    """Return the schema, in draft 7, with the keys of all extensions."""
    described = _describe_keys(build_schema(), "", list_keys() | list_groups())
    described["properties"] = _OF_HYDRA | described["properties"]
    return {"$schema": "http://json-schema.org/draft-07/schema#", "title": "A run's config", **described}


def _describe_keys(schema: Any, prefix: str, keys: Mapping[str, Key]) -> JsonSchema:
    """Return the schema of a mapping with the fields of a dataclass. keys: what `conf/` states, by dotted name."""
    hints, properties = get_type_hints(schema), dict[str, JsonSchema]()
    for each in fields(schema):
        name, hint, allowed = f"{prefix}{each.name}", hints[each.name], find_range(each)
        value = _describe_keys(hint, f"{name}.", keys) if is_dataclass(hint) else _describe_type(hint)
        if allowed is not None:
            numbers = value.get("anyOf", [value])[0]
            numbers.get("additionalProperties", numbers).update(allowed.keywords)
        properties[each.name] = value | _describe_key(keys.get(name), is_group=is_dataclass(hint))
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _describe_type(hint: Any) -> JsonSchema:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return {"anyOf": [_describe_type(part) for part in arguments]}
    if origin is list:
        return {"type": "array", "items": _describe_type(arguments[0])}
    if origin is dict:
        return {"type": "object", "additionalProperties": _describe_type(arguments[1])}
    if is_dataclass(hint):
        return _describe_keys(hint, "", {})
    if isinstance(hint, type) and issubclass(hint, Enum):
        return {"enum": [member.value for member in hint]}
    return {} if hint is Any else {"type": _SCALARS[hint]}


def _describe_key(key: Key | None, is_group: bool) -> JsonSchema:
    """Return what `conf/` says of a key; of a group the default is a choice, not a value."""
    if key is None:
        return {}
    is_stated = key.default not in ("", "???") and not is_group
    return {"description": key.comment, **({"default": yaml.safe_load(key.default)} if is_stated else {})}
