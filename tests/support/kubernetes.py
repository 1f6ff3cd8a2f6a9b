"""Holds a Kubernetes Job against its published schema.

kubernetes_job.json: the definitions that a Job of batch/v1 is made of, by name, of the schema of Kubernetes 1.37 in the
strict form in which the package kubernetes-validate 1.37.0 ships it (Apache-2.0), without descriptions and formats. The
package itself has all kinds of all versions, and 108 MB.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

JOB = "io.k8s.api.batch.v1.Job"
_TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str, "object": dict, "array": list, "integer": int, "number": (int, float), "boolean": bool,
    "null": type(None),
}  # fmt: skip


def find_mistakes(job: Any) -> list[str]:
    """Returns what the schema of a Job does not allow, each with its place."""
    definitions = json.loads(Path(__file__).with_name("kubernetes_job.json").read_text())
    return list(_check(job, definitions[JOB], definitions, "job"))


def _check(value: Any, schema: dict[str, Any], definitions: dict[str, Any], place: str) -> Iterator[str]:
    assert schema.keys() <= {
        "$ref", "type", "enum", "oneOf", "properties", "additionalProperties", "required", "items",
    }, schema.keys()  # fmt: skip
    if "$ref" in schema:
        yield from _check(value, definitions[schema["$ref"]], definitions, place)
    if "type" in schema and not _is_one_of(value, schema["type"]):
        yield f"{place} is not {schema['type']}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{place} is none of {schema['enum']}"
    if "oneOf" in schema and sum(not list(_check(value, each, definitions, place)) for each in schema["oneOf"]) != 1:
        yield f"{place} is not one of {schema['oneOf']}"
    if isinstance(value, list):
        for number, item in enumerate(value):
            yield from _check(item, schema.get("items", {}), definitions, f"{place}[{number}]")
    if isinstance(value, dict):
        yield from (f"{place} lacks {name}" for name in schema.get("required", ()) if name not in value)
        for name, item in value.items():
            known = schema.get("properties", {}).get(name, schema.get("additionalProperties", {}))
            if known is False:
                yield f"{place} has no {name}"
            else:
                yield from _check(item, known, definitions, f"{place}.{name}")


def _is_one_of(value: Any, types: str | list[str]) -> bool:
    names = [types] if isinstance(types, str) else types
    return any(isinstance(value, _TYPES[name]) and (name == "boolean") == isinstance(value, bool) for name in names)
