"""The keys that a run is seen to read."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

from support.cases import Case, train_run

from training.config.schema import build_schema

# Code that reads keys of every run: to check them, to copy them, and to name those that are not read
OF_EVERY_RUN = (
    "training.config.validate", "training.config.ranges", "training.config.incompatible",
    "training.resolution.readers", "dataclasses", "copy", "omegaconf", "support", "tests",
)  # fmt: skip


def list_schemas(schema: type, prefix: str = "") -> Iterator[tuple[type, str]]:
    """Yields the classes of a config, each with what its keys begin with."""
    yield schema, prefix
    for name, hint in get_type_hints(schema).items():
        if isinstance(hint, type) and is_dataclass(hint):
            yield from list_schemas(hint, f"{prefix}{name}.")


@contextmanager
def recording() -> Iterator[set[str]]:
    """Gives the set of the keys of all configs that are read meanwhile, by their dotted names."""
    read: set[str] = set()
    watched = dict(list_schemas(build_schema()))

    def watch(schema: type, prefix: str) -> None:
        names = {field.name for field in fields(schema)}

        def get(config: Any, name: str) -> Any:
            caller = sys._getframe(1)
            is_whole = caller.f_code.co_name == "__eq__"  # compares configs
            if name in names and not is_whole and not caller.f_globals["__name__"].startswith(OF_EVERY_RUN):
                read.add(prefix + name)
            return object.__getattribute__(config, name)

        schema.__getattribute__ = get  # type: ignore[method-assign]

    for schema, prefix in watched.items():
        watch(schema, prefix)
    try:
        yield read
    finally:
        for schema in watched:
            del schema.__getattribute__


def train_recorded(case: Case) -> set[str]:
    """The whole run on this rank. Returns the keys that it read."""
    with recording() as read:
        train_run(case)
    return read
