"""Checks a value against a JSON Schema, by the keywords that the schema of a run's config uses."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Any

KINDS: dict[str, Any] = {
    "object": dict, "array": list, "string": str, "boolean": bool, "null": type(None), "number": int | float,
    "integer": int,
}  # fmt: skip
BOUNDS = {
    "minimum": operator.ge, "maximum": operator.le, "exclusiveMinimum": operator.gt, "exclusiveMaximum": operator.lt,
}  # fmt: skip
WORDS = {"$schema", "title", "description", "default"}  # that demand nothing
STRUCTURE = {"type", "enum", "const", "anyOf", "items", "properties", "additionalProperties"}


def find_errors(value: Any, schema: Mapping[str, Any], place: str = "") -> Iterator[str]:
    """Yields where a value is not what the schema says, by dotted keys."""
    assert schema.keys() <= {*WORDS, *STRUCTURE, *BOUNDS}, f"{place}: a keyword that is not checked here"
    if "type" in schema and not _is_kind(value, schema["type"]):
        yield f"{place}: {value!r} is not of type {schema['type']}"
        return
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if any(is_number and not holds(value, schema[bound]) for bound, holds in BOUNDS.items() if bound in schema):
        yield f"{place}: {value!r} is out of its range"
    if value not in schema.get("enum", [value]) or value != schema.get("const", value):
        yield f"{place}: {value!r} is not one of its values"
    if "anyOf" in schema and all(any(find_errors(value, part, place)) for part in schema["anyOf"]):
        yield f"{place}: {value!r} is none of what it may be"
    if isinstance(value, list) and "items" in schema:
        for number, item in enumerate(value):
            yield from find_errors(item, schema["items"], f"{place}[{number}]")
    for key, inner in value.items() if isinstance(value, dict) else ():
        known = schema.get("properties", {}).get(key, schema.get("additionalProperties", {}))
        if known is False:
            yield f"{place}.{key}: not known"
        else:
            yield from find_errors(inner, known, f"{place}.{key}")


def _is_kind(value: Any, kind: str) -> bool:
    return isinstance(value, KINDS[kind]) and (kind == "boolean" or not isinstance(value, bool))
