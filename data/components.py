"""User-defined components, named in a config.

`{_target_: my_data.MyEncoder, field: text}` is `my_data.MyEncoder(field="text")`.
"""

import ast
import importlib
import importlib.util
import inspect
import os
import site
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import xxhash

from errors import UserError
from extension import check_not_removed, load_extensions
from filesystem import hash_ends, hash_file

TARGET = "_target_"
_ROOT = Path(__file__).parents[1]
_OURS = ("data", "extensions", "models", "training")
_HASHED_WHOLE = 2**26  # bytes of the largest file that is hashed whole: it may be the data themselves
# Folders of Python and of installed packages, and those of this project that make no samples
_INSTALLED = tuple(
    os.path.realpath(folder) + os.sep
    for folder in (
        *(str(_ROOT / name) for name in ("models", "training")),
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        *site.getsitepackages(),
        site.getusersitepackages(),
    )
)


def build_component(spec: Mapping[str, Any], key: str) -> Any:
    """Call the function or class named by `_target_` with the other fields, and return the result.

    Modules are also looked for in the working directory. Raises `UserError`, naming the config key, when there is no
    such target or it does not take these fields. Exceptions of its own code pass through.
    """
    name = spec[TARGET]
    arguments = {field: value for field, value in spec.items() if field != TARGET}
    target = find_component(name, key)
    try:
        inspect.signature(target).bind(**arguments)
    except TypeError as error:
        raise UserError(
            f"{key}: {name} does not take these fields: {error}; it is called with {sorted(arguments)}"
        ) from None
    return target(**arguments)


def build_checked_component(spec: Any, key: str, *, example: str, fits: Callable[[Any], bool], need: str) -> Any:
    """Build the component that `spec` names. example: a name for messages. need: what it must be, in words.

    Raises `UserError` where `spec` is not a mapping or `fits` rejects the result.
    """
    if not isinstance(spec, dict):
        raise UserError(f"{key}={spec}: give a mapping, such as {{_target_: {example}, field: value}}")
    built = build_component({TARGET: None, **spec}, key)
    if not fits(built):
        raise UserError(f"{key}: {spec[TARGET]} must be {need}")
    return built


def find_component(name: object, key: str) -> Callable[..., Any]:
    """Return the class or function of that name. Raises `UserError` as `build_component` does."""
    module_name, _, attribute = name.rpartition(".") if isinstance(name, str) else ("", "", "")
    if not module_name:
        raise UserError(
            f"{key}: {TARGET}={name}; name a class or a function with its module, such as my_data.MyEncoder"
        )
    target = getattr(_import_module(module_name, name, key), attribute, None)
    if not callable(target):
        raise UserError(f"{key}: {TARGET}={name}: the module {module_name} has no class or function '{attribute}'")
    return target


def _import_module(module_name: str, name: object, key: str) -> Any:
    load_extensions()  # modules that have moved are found under their former names
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        return importlib.import_module(module_name)
    except ImportError as error:
        check_not_removed(module_name, f"{key}: {TARGET}={name}")
        first = (error.name or "").partition(".")[0]
        if first and ((_ROOT / first).is_dir() or (_ROOT / f"{first}.py").is_file()):
            raise UserError(
                f"{key}: {TARGET}={name}: {error}: {first} is a part of this project, in {_ROOT}; give a module of "
                "your own another name"
            ) from None
        is_absent = isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}.")
        if not is_absent:
            raise  # the module exists; one of its own imports is missing
        raise UserError(
            f"{key}: {TARGET}={name}: there is no module {module_name}; start the run in its folder, or set PYTHONPATH"
        ) from None


def describe_component(spec: Mapping[str, Any], key: str = TARGET) -> list:
    """Return what the results of the component that `spec` names depend on beyond its fields: see `describe_code`.
    Raises `UserError` as `find_component` does."""
    return describe_code(find_component(spec.get(TARGET), key), spec, str(spec.get(TARGET)))


def is_ours(thing: object) -> bool:
    """Return whether the class of an object is one of this project, the extensions that come with it included. Values
    that are stored of those are named by versions, which change where the values do; of a user's by `describe_code`."""
    return type(thing).__module__.partition(".")[0] in _OURS


def describe_code(thing: object, fields: object = (), name: str = "") -> list:
    """Return what the results of a function, or of an object's class, depend on: a hash of the source of its module and
    of all that this imports, except installed packages; and the content of each file that they name in a text, or that
    `fields` name.

    fields: JSON values that it is called or built with. name: as a config gives it, with its module. Source that was
    typed in at a prompt is unknown, and so is a file whose name the code composes.
    """
    defined_by = thing if inspect.isroutine(thing) or inspect.isclass(thing) else type(thing)
    modules = _collect_modules([name.rpartition(".")[0], defined_by.__module__ or ""])
    texts = set(_list_texts(fields))
    for file, source in modules.items():
        if not file.is_relative_to(Path(__file__).parent):  # encoders of this project read no files
            texts |= {text for constant in _list_constants(source) for text in (constant, str(file.parent / constant))}
    # A file by its last name: it may lie elsewhere on another host.
    files = [os.path.expanduser(text) for text in sorted(texts)]
    contents = sorted(
        [os.path.basename(file), *_describe_content(Path(file))] for file in files if os.path.isfile(file)
    )
    return [xxhash.xxh3_128_hexdigest(b"\0".join(sorted(modules.values()))), contents]


def _describe_content(file: Path) -> list:
    """Return a hash of all of a file; of a large one its size, modification time and a hash of its ends."""
    status = file.stat()
    if status.st_size <= _HASHED_WHOLE:
        return [hash_file(file)]
    return [status.st_size, status.st_mtime_ns, hash_ends(file)]


def _list_texts(value: object) -> Iterator[str]:
    """Yield the texts within a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _list_texts(each)


def _collect_modules(names: Sequence[str]) -> dict[Path, bytes]:
    """Return file -> source of modules and of those that they import anywhere, except installed ones."""
    found: dict[Path, bytes] = {}
    seen: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        file = None if name in seen else _find_source(name)
        seen.add(name)
        if file is not None:
            found[file] = file.read_bytes()
            waiting += _list_imports(found[file], name if file.name == "__init__.py" else name.rpartition(".")[0])
    return found


def _find_source(name: str) -> Path | None:
    """Return the source file of a module; None for one of Python or of an installed package, and without a file. An
    installed package is not imported for it."""
    top, _, rest = name.partition(".")
    try:
        if name in sys.modules:
            origin = getattr(sys.modules[name], "__file__", None)
        else:
            spec = importlib.util.find_spec(top)
            if rest and spec is not None and not _is_installed(spec.origin):
                spec = importlib.util.find_spec(name)
            origin = spec.origin if spec is not None else None
    except Exception:  # not a name, or the module that it is in cannot be imported: neither could the code
        return None
    return None if _is_installed(origin) or not str(origin).endswith(".py") else Path(str(origin))


def _is_installed(origin: str | None) -> bool:
    return origin is not None and os.path.realpath(origin).startswith(_INSTALLED)


def _walk(source: bytes) -> Iterator[ast.AST]:
    """Yield the nodes of a module; none of one that could not be imported."""
    with suppress(SyntaxError):
        yield from ast.walk(ast.parse(source))


@cache
def _list_constants(source: bytes) -> list[str]:
    """Return the texts that a module holds."""
    return [node.value for node in _walk(source) if isinstance(node, ast.Constant) and isinstance(node.value, str)]


@cache
def _list_imports(source: bytes, package: str) -> list[str]:
    """Return the names of the modules that a module of `package` imports, and of those that these are in."""
    found: list[str] = []
    for node in _walk(source):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*parents, *([node.module] if node.module else [])])
            names = [f"{module}.{alias.name}" for alias in node.names]  # each a module or something in one
        else:
            continue
        for name in names:
            parts = name.split(".")
            found += (".".join(parts[: number + 1]) for number in range(len(parts)))
    return found
