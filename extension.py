"""Extensions: what most runs never use, each in a folder of its own that the core does not name.

A folder `extensions/NAME/` of this project, or one of a user's in LLM_PIPELINE_EXTENSIONS, declares in its
`extension.py` what it adds: `EXTENSION = Extension(...)`. That file is read before torch is imported, for `--help` and
for every mistyped key, so it holds words and paths; the modules beside it do the work. Whoever deletes the folder has
removed the capability.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from errors import UserError

OWN_FOLDERS = "LLM_PIPELINE_EXTENSIONS"  # in the environment: folders of users' extensions, separated by `:`
ROOT = Path(__file__).resolve().parent
SHIPPED, CONF = ROOT / "extensions", ROOT / "conf"


@dataclass(frozen=True, kw_only=True)
class Extension:
    """The things that a folder adds to the project: each field is one of the places where the core asks its
    extensions.

    Configs and choices of config groups need no field: `FOLDER/conf/` is searched as `conf/` is, so that
    `conf/logger/mine.yaml` in it is `logger=mine`, and `conf/my_run.yaml` is `-cn my_run`.
    """

    folder: Path  # of the extension: `Path(__file__).parent`
    # Commands of its own, with what each is for, as `--help` lists them: {"python -m extensions.NAME FILE": "..."}
    commands: Mapping[str, str] = field(default_factory=dict)
    # Groups of keys -> "module:dataclass", whose fields have defaults: {"mine": "mine.keys:MineConfig"} is the key
    # `mine.alpha`; the fields for a group of the project, such as `data`, are further keys of it. The module is
    # imported before torch. A run has them as `config.read_group(MineConfig)`
    keys: Mapping[str, str] = field(default_factory=dict)
    # "module:name" of what a run needs to read them: {key: `Feature` of training/config/incompatible.py}. A run that is
    # given a key and does not read it says so
    readers: str = ""
    # "module:name" of kinds of data (`DataKind` in data/encoders/kind.py), each with its choice in `conf/data/`
    data_kinds: str = ""
    # "module:name" of objectives (`Objective` in training/objectives/objective.py), which `task` names
    objectives: str = ""
    # "module:name" of modifiers (`Modifier` in training/objectives/objective.py): keys that change the loss of next
    # tokens. One whose key names a frozen model, which scores the data before training or runs before each step, is an
    # `AuxiliaryModel` (training/objectives/auxiliary.py)
    modifiers: str = ""
    # "module:name" of heads (`Head` in models/heads/head.py)
    heads: str = ""
    # Files next to the weights of a model that its runs make, by their paths in its folder: conversions and exports
    # copy them, and runs that do not make them leave them behind
    model_files: tuple[str, ...] = ()
    # "module:class" of an `ExportReceiver` (training/export_receiver.py), which takes what a run exports
    receiver: str = ""
    # Keys that are true or false, and false by default -> "module:function" of what runs in place of training where one
    # is true. The function takes the config, the ranks (`Ranks`, before they join), and the keys that the command line
    # gives; it may raise UserError: {"mine_only": "mine.run:run"} is `mine_only=true`
    actions: Mapping[str, str] = field(default_factory=dict)
    # "module:function" of what a run records of itself in run.json before its first step. The function takes the config
    # and the host of each rank, and returns a mapping, ready for JSON, from names to mappings; where one of these has a
    # `summary`, a model card shows it
    facts: str = ""
    # Values of the key `plan` beyond true and false -> "module:function". The function takes the config and the width
    # of the screen in characters (None for no limit), and yields texts as soon as it knows them; it may raise
    # UserError. A line `use: ...` is the command of the layout that it proposes, or its keys alone, KEY=VALUE
    # (training/cli/plan_process.py)
    plans: Mapping[str, str] = field(default_factory=dict)
    # Options of the training command -> "module:function" of what runs in its place, before torch is imported. The
    # function takes the path of the script, the arguments, and the name of the config without `-cn`; it returns the
    # exit code, and may raise UserError. `--multirun`, which Hydra knows, is given by its short form `-m` too
    flags: Mapping[str, str] = field(default_factory=dict)
    # Options that it adds to `scripts/supervise.py`, with what each is for: {"--mine": "..."} is a flag, and
    # {"--mine N": "..."} takes a value
    options: Mapping[str, str] = field(default_factory=dict)
    # "module:function" of what changes the command of each start under `scripts/supervise.py`. The function takes the
    # values of all options (`argparse.Namespace`) and a function that prints a line; it returns None, or a function
    # that takes the command and returns the one that is started. Both may raise UserError
    starter: str = ""
    # "module:name" of rows (`Row` in training/config/incompatible.py): features that do not go together
    refusals: str = ""
    # Keys of other trainers, and choices of groups (GROUP=CHOICE) -> the key or choice of this extension, for the hint
    # at an unknown one
    hints: Mapping[str, str] = field(default_factory=dict)
    # Modules that were elsewhere -> where they are now, by their dotted names. A `_target_` in a saved config, or a
    # user's import, that names the former goes on working, with a warning. A package of them that is gone is listed too
    aliases: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for each in fields(self):
            kind = {"Path": Path, "str": str, "tuple[str, ...]": tuple}.get(str(each.type), Mapping)
            if not isinstance(value := getattr(self, each.name), kind):
                raise TypeError(f"{each.name}={value!r} is not a {kind.__name__}")

    @property
    def name(self) -> str:
        """The name of its folder."""
        return self.folder.name

    @property
    def package(self) -> str:
        """The dotted name by which its modules are imported."""
        return f"{SHIPPED.name}.{self.name}" if self.is_shipped else self.name

    @property
    def is_shipped(self) -> bool:
        """Whether it came with the project."""
        return self.folder.resolve().parent == SHIPPED

    @property
    def conf(self) -> Path:
        """The folder with its configs; it need not exist."""
        return self.folder / "conf"


@cache
def load_extensions() -> tuple[Extension, ...]:
    """Return the project's extensions by name, then those of LLM_PIPELINE_EXTENSIONS in its order. Raises UserError for
    a folder of the latter that declares none, or whose name is taken, and for two that offer the same."""
    found = {file.parent.name: _read(file, f"{SHIPPED.name}.{file.parent.name}") for file in _list_shipped()}
    for folder in _list_own():
        file, name = folder / "extension.py", folder.name
        if not file.is_file():
            raise UserError(f"{OWN_FOLDERS}: {folder} has no extension.py; docs/extensions.md shows one")
        if "." in name or name in found or _is_elsewhere(name, folder):
            raise UserError(f"{OWN_FOLDERS}: {folder}: there is a package {name} already; rename the folder")
        if str(folder.parent) not in sys.path:
            sys.path.append(str(folder.parent))
        found[name] = _read(file, name)
    _check_offered_once(found.values())
    if any(extension.aliases for extension in found.values()):
        # First: a package that has moved would be searched by the names of both places
        sys.meta_path.insert(0, _Aliases({old: new for each in found.values() for old, new in each.aliases.items()}))
    return tuple(found.values())


def _list_shipped() -> list[Path]:
    return sorted(SHIPPED.glob("*/extension.py"))


def _list_own() -> Iterator[Path]:
    named = os.environ.get(OWN_FOLDERS, "").split(os.pathsep)
    folders = (Path(os.path.abspath(Path(each.strip()).expanduser())) for each in named if each.strip())
    yield from dict.fromkeys(folders)


def _is_elsewhere(name: str, folder: Path) -> bool:
    """Return whether another package than the folder is imported by its name."""
    spec = importlib.util.find_spec(name)
    return spec is not None and not any(
        Path(place).resolve() == folder.resolve() for place in spec.submodule_search_locations or ()
    )


def _check_offered_once(extensions: Iterable[Extension]) -> None:
    owners: dict[str, str] = {}
    for extension in extensions:
        offered = [
            *extension.actions,
            *(f"plan={value}" for value in extension.plans),
            *extension.flags,
            *list_options(extension),
            *extension.aliases,
        ]
        for each in offered:
            if (owner := owners.setdefault(each, extension.name)) != extension.name:
                raise UserError(f"{OWN_FOLDERS}: the extensions {owner} and {extension.name} both offer {each}")
    _check_configs_once(extensions)


def _check_configs_once(extensions: Iterable[Extension]) -> None:
    """Raise UserError for a config or a choice of a group in two places: Hydra would take the first and say nothing."""
    known: dict[Path, Path] = {}
    for extension in extensions:
        for file in sorted(extension.conf.rglob("*.yaml")):
            path = file.relative_to(extension.conf)
            first = known.setdefault(path, CONF / path if (CONF / path).is_file() else file)
            if not first.samefile(file):
                group = "-cn " if path.parent == Path() else f"{path.parent.as_posix()}="
                raise UserError(f"{OWN_FOLDERS}: {first} and {file} are both {group}{path.stem}; rename one")


def _read(file: Path, package: str) -> Extension:
    """Return what a folder declares. package: the dotted name of the folder."""
    try:
        declared = getattr(importlib.import_module(f"{package}.extension"), "EXTENSION", None)
    except Exception as error:  # of a user's code
        raise UserError(f"{file} cannot be imported ({type(error).__name__}: {error}); correct it") from error
    if not isinstance(declared, Extension) or declared.folder.resolve() != file.parent.resolve():
        raise UserError(f"{file}: it has to set EXTENSION = Extension(folder=Path(__file__).parent, ...)")
    return declared


def list_own_names() -> list[str]:
    """Return the names of users' extensions, which a run records: it is resumed with them."""
    return [extension.name for extension in load_extensions() if not extension.is_shipped]


def list_conf_folders() -> list[Path]:
    """Return the folders with configs of extensions, which are searched after `conf/`."""
    return [extension.conf for extension in load_extensions() if extension.conf.is_dir()]


def load_part(place: str) -> Any:
    """Return what an extension names by "module:name"."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def load_parts(field: str) -> tuple[Any, ...]:
    """Return what all extensions name by a field whose value is "module:name" of a sequence, end to end."""
    places = (getattr(extension, field) for extension in load_extensions())
    return tuple(part for place in places if place for part in load_part(place))


def name_parts(parts: Iterable[Any], words: str) -> dict[str, Any]:
    """Return parts by their `name`. words: what they are. Raises UserError for two of one name."""
    named: dict[str, Any] = {}
    for part in parts:
        if named.setdefault(part.name, part) is not part:
            raise UserError(f"{OWN_FOLDERS}: there are two {words} '{part.name}'; give one of them another name")
    return named


def collect_facts(*described: Any) -> dict[str, Any]:
    """Return what extensions record of a run, by name. described: the run, as `Extension.facts` takes it."""
    found: dict[str, Any] = {}
    for extension in load_extensions():
        if extension.facts:
            found |= load_part(extension.facts)(*described)
    return found


def list_model_files() -> list[str]:
    """Return the files of extensions next to a model's weights, as `Extension.model_files` has them."""
    return [name for extension in load_extensions() for name in extension.model_files]


def list_options(extension: Extension) -> list[str]:
    """Return the options of `Extension.options` without their values."""
    return [option.partition(" ")[0] for option in extension.options]


def list_actions() -> dict[str, str]:
    """Return the keys that run something in place of training, with what each runs, as `Extension.actions` has it."""
    return {key: place for extension in load_extensions() for key, place in extension.actions.items()}


def list_flags() -> dict[str, str]:
    """Return the options that take the place of the training command, with what each runs, as `Extension.flags` has
    it."""
    return {flag: place for extension in load_extensions() for flag, place in extension.flags.items()}


def list_plans() -> dict[str, str]:
    """Return the further values of the key `plan`, with what each runs, as `Extension.plans` has it."""
    return {value: place for extension in load_extensions() for value, place in extension.plans.items()}


def find_plan(value: str) -> str:
    """Return what a value of `plan` runs. Raises UserError for an unknown one."""
    if value not in (known := list_plans()):
        check_not_removed(f"plan={value}", f"plan={value}")
        raise UserError(f"plan={value}: one of {', '.join(['false', 'true', *known])}")
    return known[value]


def check_not_removed(named: str, words: str) -> None:
    """Raise UserError for something of an extension of the project whose folder is not there.

    named: a key with its dots, GROUP=CHOICE, the name of a config, an option, or the dotted name of a module. words:
    what the user has written.
    """
    if not (SHIPPED / "table.py").is_file():
        return
    table: Mapping[str, tuple[str, ...]] = importlib.import_module(f"{SHIPPED.name}.table").TABLE
    present = {extension.name for extension in load_extensions()}
    for name, offered in table.items():
        if name in present:
            continue
        prefixes = (f"{SHIPPED.name}.{name}.", *(each for each in offered if each.endswith(".")))
        if named in offered or named.startswith(prefixes):
            raise UserError(f"{words} belongs to the extension '{name}', and the folder extensions/{name} is not there")


class _Aliases(MetaPathFinder, Loader):
    """Imports a module that has moved, under its former name."""

    def __init__(self, moved: Mapping[str, str]) -> None:
        self._moved = moved

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name in self._moved else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        new = self._moved[spec.name]
        warnings.warn(f"{spec.name} is {new} now; write that in its place", FutureWarning, stacklevel=2)
        module = importlib.import_module(new)
        spec.loader_state = module.__spec__  # which the import replaces
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state
