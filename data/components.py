"""User-defined components, named in a config.

`{_target_: my_data.MyEncoder, field: text}` is `my_data.MyEncoder(field="text")`.
"""

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from errors import UserError

TARGET = "_target_"


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
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module exists; one of its own imports is missing
        raise UserError(
            f"{key}: {TARGET}={name}: there is no module {module_name}; start the run in its folder, or set PYTHONPATH"
        ) from None


def describe_code(thing: object) -> str:
    """Return the source of the module that defines a function or an object's class: a change of it may change the
    results.
    """
    defined_by = thing if inspect.isroutine(thing) or inspect.isclass(thing) else type(thing)
    try:
        return inspect.getsource(sys.modules[defined_by.__module__])
    except (OSError, TypeError):
        return ""  # typed in at a prompt
