"""Every name of the table is looked for in the installed packages; every such name in the sources is in the table."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
import time
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

import peft  # noqa: F401  its entries are checked too
import pytest
import torch
from packaging.requirements import Requirement
from support.configs import build_config

import training.engine.gradient_sums
import training.engine.pipeline_engine
import training.pipeline.module
import training.setup
from errors import UserError
from training import entry
from training.config.schema import FusedKernels, RunConfig
from training.distributed.ranks import SINGLE_PROCESS
from training.engine import deepspeed_internals
from training.engine.deepspeed_internals import PACKAGES, TABLE, Internal, check_internals, find_missing

ROOT = Path(__file__).resolve().parents[3]
NEEDED = [entry for entry in TABLE if entry.is_needed]
INSTALLED = [entry for entry in NEEDED if find_spec(entry.place.partition(":")[0].partition(".")[0]) is not None]
NAMES = [(entry, name) for entry in INSTALLED for name in entry.names]
LISTED = {name for entry in TABLE for name in entry.names}
# Where foreign names are looked for. scripts/ and benchmarks/ are not part of a run; of data/ one
# name is listed, by hand.
SOURCES = [file for folder in ("training", "models") for file in sorted((ROOT / folder).rglob("*.py"))]
SOURCES = [file for file in SOURCES if file.name != "deepspeed_internals.py"]
# Python's own, documented in spite of their names.
PYTHON = {
    "os._exit", "sys._current_frames", "sharing._replace", "unit._replace", "cls._fields", "Sharing._fields",
    "self._asdict",
}  # fmt: skip
BY_NAME = {"getattr", "hasattr", "setattr", "patch"}  # take a name as their second argument


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """The config of a run with an adapter, so that peft is checked."""
    return build_config("adapter=lora", f"output_dir={tmp_path_factory.mktemp('internals')}")


def test_all_names_are_there_and_the_check_is_fast() -> None:
    start = time.perf_counter()
    check_internals(["peft"])
    assert time.perf_counter() - start < 0.3


@pytest.mark.parametrize("entry, name", NAMES, ids=lambda part: part if isinstance(part, str) else part.place)
def test_a_run_does_not_start_without_one_of_them(
    entry: Internal, name: str, monkeypatch: pytest.MonkeyPatch, config: RunConfig
) -> None:
    take_away(entry, name, monkeypatch)
    works = f"{entry.package}{PACKAGES[entry.package].works}"
    with pytest.raises(UserError) as raised:
        training.setup.check_run(config, SINGLE_PROCESS)
    assert str(raised.value) == (
        f"{entry.package} {version(entry.package)} has no {entry.place.replace(':', '.')}.{name}, which is needed for "
        f"{entry.use}; known to work are {works} (pip install -r requirements.txt)"
    )


def take_away(entry: Internal, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Act as if a release had renamed it: remove it from the class or module, or from the code that names it. Only this
    entry of the table is left, since another may look for the same name elsewhere."""
    monkeypatch.setattr(deepspeed_internals, "TABLE", (Internal(entry.package, entry.place, (name,), entry.use),))
    module_name, _, path = entry.place.partition(":")
    above: Any = importlib.import_module(module_name)
    *parents, last = path.split(".") if path else [""]
    for parent in parents:
        above = getattr(above, parent)
    owner = getattr(above, last) if last else above
    if isinstance(owner, FunctionType):
        rename_in(inspect.unwrap(owner), name, monkeypatch)
        return
    for holder in inspect.getmro(owner) if isinstance(owner, type) else [owner]:
        for function in vars(holder).values() if isinstance(holder, type) else ():
            if isinstance(function, FunctionType) and holder.__module__.startswith(module_name.split(".")[0]):
                rename_in(inspect.unwrap(function), name, monkeypatch)
        if name in getattr(holder, "__dataclass_fields__", ()):
            monkeypatch.delitem(holder.__dataclass_fields__, name)
        if name in vars(holder) and not isinstance(owner, torch._ops._OpNamespace):
            try:
                monkeypatch.delattr(holder, name)
            except TypeError:  # a class that is written in C
                monkeypatch.setattr(above, last, SimpleNamespace())
    if isinstance(owner, torch._ops._OpNamespace):  # which makes what is asked for
        monkeypatch.setattr(above, last, SimpleNamespace())


def rename_in(function: FunctionType, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if (renamed := rename(function.__code__, name)) != function.__code__:
        monkeypatch.setattr(function, "__code__", renamed)


def rename(code: CodeType, name: str) -> CodeType:
    other = f"{name}_renamed"
    constants = (rename(c, name) if isinstance(c, CodeType) else other if c == name else c for c in code.co_consts)
    names = (other if each == name else each for each in code.co_names)
    return code.replace(co_names=tuple(names), co_consts=tuple(constants))


def test_a_module_or_class_that_is_gone_is_missing_too() -> None:
    for place in ("deepspeed.runtime.pipe.no_such", "deepspeed.runtime.pipe.engine:NoSuch"):
        assert find_missing(Internal("deepspeed", place, ("x",), "y")) == place.replace(":", ".")


def test_without_an_adapter_peft_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tuple(Internal(entry.package, f"{entry.package}.gone", ("x",), "y") for entry in TABLE)
    monkeypatch.setattr(deepspeed_internals, "TABLE", [entry for entry in broken if entry.package == "peft"])
    check_internals()
    with pytest.raises(UserError, match="has no peft.gone"):
        check_internals(["peft"])


def test_the_kernels_of_liger_are_looked_up_where_a_run_fuses(
    monkeypatch: pytest.MonkeyPatch, config: RunConfig
) -> None:
    """The package is not here: an empty one stands for a release that has renamed its functions."""
    for name in ("liger_kernel", "liger_kernel.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(deepspeed_internals, "version", lambda package: "9.9")
    check_internals()
    with pytest.raises(UserError, match="liger-kernel 9.9 has no liger_kernel.ops.LigerRMSNormFunction, which is need"):
        check_internals(["liger-kernel"])
    monkeypatch.setattr(training.setup, "has_accelerator", lambda: True)
    monkeypatch.setattr(training.setup, "has_package", lambda name: True)
    with pytest.raises(UserError, match="liger-kernel 9.9 has no liger_kernel.ops"):
        training.setup.check_run(replace(config, fused_kernels=FusedKernels.auto), SINGLE_PROCESS)


def test_the_versions_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    stated = {Requirement(line).name: Requirement(line).specifier for line in project["project"]["dependencies"]}
    pinned = "\n".join([(ROOT / "requirements.txt").read_text(), *project["dependency-groups"]["kernels"]])
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", pinned, re.MULTILINE))
    page = (ROOT / "docs" / "performance.md").read_text()
    assert f"`pip install liger-kernel`; {PACKAGES['liger-kernel'].read} was read" in page
    for name, package in PACKAGES.items():
        specifier = Requirement(f"{name}{package.works}").specifier
        assert specifier == stated.get(name, specifier) and specifier.contains(pins[name])
        assert package.read == pins[name]
    assert {entry.package for entry in TABLE} == set(PACKAGES)


# The names that the sources use


def list_foreign(tree: ast.Module, own: set[str]) -> Iterator[tuple[int, str]]:
    """(line, name) of private names that this project does not define: attributes, also in calls like `getattr`, and
    imports of a private name or from a module with a private name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and ast.unparse(node) not in PYTHON:
            yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom):
            private = any(is_private(part) for part in (node.module or "").split("."))
            yield from ((node.lineno, alias.name) for alias in node.names if private or is_private(alias.name))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in BY_NAME:
            yield from (
                (node.lineno, argument.value)
                for argument in node.args[1:2]
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str) and is_private(argument.value)
            )


def is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def list_own(tree: ast.Module) -> set[str]:
    """Names that a file defines, by themselves, as attributes of `self`, or in a class."""
    stored = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value)
    }
    plain = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return stored | plain | {node.name for node in ast.walk(tree) if isinstance(node, kinds)}


def test_every_private_name_of_another_package_is_listed() -> None:
    trees = {file: ast.parse(file.read_text()) for file in SOURCES}
    own = set().union(*(list_own(tree) for tree in trees.values()))
    unlisted = [
        f"{file.relative_to(ROOT)}:{line} {name}"
        for file, tree in trees.items()
        for line, name in list_foreign(tree, own)
        if name not in LISTED and name not in own
    ]
    assert unlisted == [], "give it an entry in training/engine/deepspeed_internals.py"


@pytest.mark.parametrize(
    "text",
    [
        "engine._secret()",
        "optimizer._secret = 1",
        "getattr(x, '_secret')",
        "from a import _secret",
        "from a._b import _secret",
    ],
)
def test_a_new_private_name_is_found(text: str) -> None:
    tree = ast.parse(text)
    assert [name for _, name in list_foreign(tree, set())] == ["_secret"] and "_secret" not in list_own(tree)


SUBCLASSES = [
    value
    for module in (training.engine.pipeline_engine, training.pipeline.module)
    for value in vars(module).values()
    if isinstance(value, type) and value.__module__ == module.__name__
    if any(base.__module__.startswith("deepspeed") for base in value.__mro__)
]


@pytest.mark.parametrize("subclass", SUBCLASSES, ids=lambda subclass: subclass.__name__)
def test_what_a_subclass_overrides_or_takes_from_deepspeed_is_listed(subclass: type) -> None:
    bases = tuple(base for base in subclass.__mro__ if base.__module__.startswith("deepspeed"))
    tree = ast.parse(inspect.getsource(subclass))
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and is_self(node.value)}
    used |= set(vars(subclass)) - {"_abc_impl", "__abstractmethods__"}
    public = set(dir(torch.nn.Module)) - {"forward"}
    taken = {name for name in used if name not in public and is_of(bases, name)}
    assert {name for name in taken if not name.startswith("__")} <= LISTED


def is_self(node: ast.expr) -> bool:
    """`self` or `super()`."""
    name = node.func if isinstance(node, ast.Call) else node
    return isinstance(name, ast.Name) and name.id in ("self", "super")


def is_of(bases: tuple[type, ...], name: str) -> bool:
    return any(deepspeed_internals.has_name(base, name) for base in bases)


def test_every_patch_replaces_something_listed() -> None:
    tree = ast.parse(inspect.getsource(training.engine.gradient_sums))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "patch"]
    assert {ast.literal_eval(call.args[1]) for call in calls} <= LISTED and len(calls) == 3
    stores = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]
    assert {node.attr for node in stores if not is_self(node.value)} == {"grad", "overflow"}, "use patch()"


def test_a_patch_of_what_is_gone_raises() -> None:
    optimizer = SimpleNamespace()
    with pytest.raises(UserError, match=r"deepspeed .* has no SimpleNamespace.check_overflow"):
        deepspeed_internals.patch(optimizer, "check_overflow", None)
    assert not hasattr(optimizer, "check_overflow")


def test_a_name_that_is_needed_while_modules_are_imported_ends_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A class body that reads it, say: the import fails before anything is checked."""
    monkeypatch.setitem(sys.modules, "training.run", None)  # which makes its import an ImportError
    with pytest.raises(ImportError):
        entry.import_work(is_plan=False)  # nothing of the table is missing
    gone = Internal("deepspeed", "deepspeed.runtime.engine:DeepSpeedEngine", ("_GONE",), "running a schedule")
    monkeypatch.setattr(deepspeed_internals, "TABLE", (gone,))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(name, "1" if name == "WORLD_SIZE" else "0")
    with pytest.raises(SystemExit):
        entry.import_work(is_plan=False)
    assert "has no deepspeed.runtime.engine.DeepSpeedEngine._GONE, which is needed" in capfd.readouterr().err


def test_nothing_is_listed_that_is_not_used() -> None:
    files = [*SOURCES, *(ROOT / "data").rglob("*.py")]
    words = {word for file in files for word in re.findall(r"\w+", file.read_text())}
    assert sorted(LISTED - words) == []
