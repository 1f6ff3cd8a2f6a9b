"""Modules of an engine's wheel on a machine without its GPU libraries: those that are named are the wheel's own, all
others of the package are empty stand-ins, whose names are empty classes. An engine's own code then parses and stacks an
adapter, on a CPU."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import logging
import sys
import types
import zipfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any


class EmptyType(type):
    """The type of the empty classes: each has any attribute, another empty class."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return make_empty(name)

    def __or__(cls, other: object) -> Any:  # in annotations
        return cls

    def __ror__(cls, other: object) -> Any:
        return cls

    def __getitem__(cls, item: object) -> Any:
        return cls


def make_empty(name: str) -> Any:
    """Return an empty class, which is also a decorator that changes nothing."""

    def create(cls: type, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and not kwargs and callable(args[0]) else object.__new__(cls)

    return EmptyType(name, (), {"__new__": create, "__init__": lambda self, *args, **kwargs: None})


class EmptyModule(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = make_empty(name)
        setattr(self, name, found)
        return found


class QuietLogger(logging.Logger):
    """The logger of an engine, with the methods that log once."""

    def __getattr__(self, name: str) -> Any:
        if not name.endswith("_once"):
            raise AttributeError(name)
        return getattr(self, name.removesuffix("_once"))


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of one package.

    root: the folder that holds the package. own: the modules that are the wheel's. given: of stand-ins, attributes that
    are not empty classes.
    """

    def __init__(self, root: Path, package: str, own: Collection[str], given: Mapping[str, Mapping[str, Any]]) -> None:
        self.root, self.package, self.own, self.given = root, package, set(own), given

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != self.package:
            return None
        if name in self.own:
            return importlib.util.spec_from_file_location(name, self.root / f"{name.replace('.', '/')}.py")
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = EmptyModule(spec.name)
        for name, value in self.given.get(spec.name, {}).items():
            setattr(module, name, value)
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        module.__path__ = []


def install(root: Path, package: str, own: Collection[str], given: Mapping[str, Mapping[str, Any]]) -> None:
    """From now on, import the package from the folder `root`, as `StandIns` says."""
    sys.meta_path.insert(0, StandIns(root, package, own, given))


def unpack_sources(wheel: Path, folder: Path) -> str:
    """Unpack the Python files of a wheel and return its release."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if name.endswith(".py")])
    return wheel.name.split("-")[1]
