"""The checks of a command line, between the launcher and Hydra."""

from __future__ import annotations

import difflib
import os
import re
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from console import pluralize
from errors import UserError
from extension import check_not_removed, list_conf_folders, list_flags
from models.adapters.options import UNSUPPORTED
from training.config.foreign_keys import find_choice_hint, find_hint
from training.config.schema import CONF, RunConfig, build_schema

CheckNames = Callable[[DictConfig], None]
MULTIRUN = "--multirun"  # an option of Hydra's own
# Set in the environment of a run whose command line is that of several, as its config file is
SHARED_COMMAND = "LLM_PIPELINE_SHARED_COMMAND"
# OmegaConf's message for a value of the wrong type -> what the value must be.
_WRONG_TYPES = {
    r"Value '(?P<value>.*)' of type '\w+' could not be converted to Integer": "a whole number",
    r"Value '(?P<value>.*)' of type '\w+' could not be converted to Float": "a number",
    r"Value '(?P<value>.*)' is not a valid bool": "true or false",
    r"Invalid value '(?P<value>.*)', expected one of \[(?P<options>.*)\]": "one of {options}",
    r"Invalid value assigned: \w+ is not a ListConfig, list or tuple": "a list, such as [1,2]",
    r"field '.*' is not Optional": "a value; null is not allowed",
}


def clean_arguments(argv: Sequence[str]) -> list[str]:
    """Return `argv` without the `--local_rank=N` of DeepSpeed's launcher, on which Hydra aborts, and with all
    `key=value` at the end.

    argparse accepts keys in one place only: unsorted, `num_stages=1 -cn NAME seed=2` ends in a usage message.
    """
    command, *arguments = [argument for argument in argv if not re.match(r"--local[-_]rank=", argument)]
    return [command, *sorted(arguments, key=_is_override)]


def _is_override(argument: str) -> bool:
    return ("=" in argument and not argument.startswith("-")) or argument.startswith("~")


def find_flag(arguments: Sequence[str]) -> str | None:
    """Return what runs in place of the command, as `Extension.flags` has it; None without such a flag.

    arguments: as `clean_arguments` returns them, without the command. Raises UserError for `--multirun` where no
    extension has it.
    """
    options, unknown = parse_arguments(arguments)
    flags = list_flags()
    if options.multirun and MULTIRUN not in flags:
        check_not_removed(MULTIRUN, MULTIRUN)
        raise UserError(f"{MULTIRUN}: no extension runs several; start them one by one")
    asked = [*unknown, *([MULTIRUN] if options.multirun else [])]
    return next((flags[word] for word in asked if word in flags), None)


def asks_for_completion(arguments: Sequence[str]) -> bool:
    """Return whether the command line is that of a shell that completes one: `-sc query=bash`."""
    return bool(parse_arguments(arguments)[0].shell_completion)


def parse_arguments(arguments: Sequence[str]) -> tuple[Namespace, list[str]]:
    """Parse arguments as Hydra does. Returns its options, with the overrides, and the unknown arguments."""
    from hydra._internal.utils import get_args_parser  # private, and not imported before the check that it is there

    return get_args_parser().parse_known_args(list(arguments))


def list_given(arguments: Sequence[str]) -> set[str]:
    """Return the keys that a command line gives, by their dotted names, and the groups that it chooses; the groups
    alone where several runs share the command line, as they share a config file.

    arguments: as `clean_arguments` returns them, without the command.
    """
    parser, given = OverridesParser.create(), set[str]()
    for override in parse_arguments(arguments)[0].overrides:
        parsed = parser.parse_override(override)
        given.update(_list_keys(parsed.package or parsed.key_or_group, parsed.value()))
    return {key for key in given if SHARED_COMMAND not in os.environ or (CONF / key).is_dir()}


def _list_keys(key: str, value: Any) -> Iterator[str]:
    """Yield a key and, where its value is a mapping, the keys in it."""
    yield key
    for name, inner in value.items() if isinstance(value, dict) else ():
        yield from _list_keys(f"{key}.{name}", inner)


def check_command_line(
    arguments: Sequence[str],
    config_dir: Path,
    default_config: str,
    check_names: CheckNames | None = None,
) -> DictConfig | None:
    """Compose the run's config once, so that a mistake ends in one line and not in a stack trace. Returns it, or None
    with `--config-path`, whose configs are not the project's.

    arguments: as `clean_arguments` returns them, without the command. check_names: raises UserError when the value of a
    key such as `schedule` is not a name in its table; this package knows none of the tables.
    Raises UserError for an unknown key (with the nearest known one), a value of the wrong type, a missing config, and
    an unknown option.
    """
    options, unknown = parse_arguments(arguments)
    if unknown:
        check_not_removed(unknown[0], unknown[0])
        raise UserError(
            f"{unknown[0]} is not a valid option (--help lists them); a key of the run is given as key=value, such "
            f"as num_stages=2"
        )
    for override in options.overrides:
        _check_override(override)
    if options.config_path:
        return None
    if options.config_dir and not Path(options.config_dir).is_dir():
        raise UserError(f"--config-dir {options.config_dir}: there is no such folder")
    try:
        composed = compose_command(options, options.overrides, config_dir, default_config)
    except yaml.MarkedYAMLError as error:
        raise UserError(_describe_yaml_error(error)) from None
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        dirs = [config_dir, *list_conf_folders(), *([Path(options.config_dir)] if options.config_dir else [])]
        raise UserError(_explain(error, options.config_name or default_config, dirs, options.overrides)) from None
    _check_base(composed, options.config_name or default_config)
    if check_names is not None:
        check_names(composed)
    return composed


def compose_command(options: Namespace, overrides: Sequence[str], config_dir: Path, default_config: str) -> DictConfig:
    """Compose the config as Hydra will. options: of its command line; the folder of `--config-dir` is searched too."""
    with initialize_config_dir(str(config_dir), version_base="1.3"):
        if options.config_dir:
            loader: Any = GlobalHydra.instance().config_loader()
            loader.get_search_path().prepend("command-line", f"file://{Path(options.config_dir).resolve()}", "schema")
            loader.repository.initialize_sources(loader.get_search_path())
        return compose((options.config_name or default_config).removesuffix(".yaml"), list(overrides))


def _describe_yaml_error(error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark
    where = "a config" if mark is None else f"{mark.name}, line {mark.line + 1}"
    return f"{where}: {error.problem or 'not valid YAML'}; fix the file"


def _check_base(composed: DictConfig, config_name: str) -> None:
    """Raise UserError for a config that does not start from conf/base.yaml, and so lacks keys or, as a run's
    config.yaml, their types."""
    known = list(composed)
    missing = [item.name for item in fields(RunConfig) if item.name not in known]
    if missing or not issubclass(OmegaConf.get_type(composed) or dict, RunConfig):
        lacking = (
            f"the key '{missing[0]}' and {pluralize(len(missing) - 1, 'other')}" if missing else "the types of the keys"
        )
        raise UserError(f"-cn {config_name}: it lacks {lacking}; begin the file with 'defaults: [base, _self_]'")


def _check_override(override: str) -> None:
    """Raise UserError for what Hydra accepts silently: a key that nothing reads, added with `+`, a removed one, and an
    interpolation, which a path of data that is called so would become; in an open group, as for a tracker's key that is
    in the environment, it is replaced."""
    if override.startswith("~"):
        raise UserError(
            f"{override}: keys cannot be removed; give it another value, or null where conf/base.yaml allows it"
        )
    key, equals, value = override.partition("=")
    if not equals:
        raise UserError(f"'{override}' is not of the form key=value; conf/base.yaml lists the keys")
    key = key.lstrip("+").partition("@")[0]
    group = key.partition(".")[0]
    is_open = group in _open_groups() or any(key.startswith(f"{each}.") for each in _open_keys())
    if "${" in value and not is_open:
        raise UserError(
            f"{override}: ${{...}} on the command line is neither replaced nor taken as text; write the value itself, "
            "or a shell variable outside of single quotes"
        )
    if override.startswith("+") and not is_open and key not in _known_keys():
        raise UserError(_unknown_key(key))


def _explain(error: Exception, config_name: str, dirs: Sequence[Path], overrides: Sequence[str]) -> str:
    chain: list[BaseException] = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    text = "\n".join(str(link) for link in chain)
    # Of a value in a file Hydra says first which config it composed.
    reason = re.sub(r"^In '.*': \w+ raised while composing config:\n", "", str(chain[-1])).splitlines()[0]
    if isinstance(error, MissingConfigException):
        return _missing_config(str(error.missing_cfg_file), config_name, dirs)
    if isinstance(error, OverrideParseException):
        key, _, value = error.override.partition("=")
        return (
            f"{error.override}: cannot be read ({reason}); "
            f"a value with special characters needs quotes inside the shell's: '{key}=\"{value}\"'"
        )
    if several := _first(r"Ambiguous value for argument '(.*)'", text):
        key, _, values = several.partition("=")
        each = f"; {MULTIRUN} starts one run for each value" if MULTIRUN in list_flags() else ""
        return f"{several} is several values; write {key}=[{values}] for a list{each}"
    full_key = _first(r"full_key: (\S+)", text)
    if unknown := _first(r"Key '([^']+)' (?:is not in struct|not in )", text):
        others = [key for word in overrides if _is_unknown(key := word.partition("=")[0])]
        *lines, last = map(_unknown_key, dict.fromkeys([full_key or unknown, *others]))
        return " ".join([*(line if line.endswith("?") else f"{line}." for line in lines), last])
    if full_key is None:
        return f"{reason} (in: {' '.join(overrides)})"
    if full_key.isdecimal():  # OmegaConf (2.3.1) names an entry of a list of lists without its key
        lists = [key.lstrip("+") for key, _, value in (word.partition("=") for word in overrides) if value[:1] == "["]
        full_key = f"{' or '.join(lists)}, entry {int(full_key) + 1}"
    for pattern, wanted in _WRONG_TYPES.items():
        if match := re.match(pattern, reason):
            given = match.groupdict()
            value = f"={given['value']}" if "value" in given else ""
            null = ", null" if "options" in given and _allows_null(full_key) else ""
            return f"{full_key}{value}: must be {wanted.format(**given)}{null}"
    return f"{full_key}: {reason}"


def _allows_null(key: str) -> bool:
    """Return whether null is a value of a key of the schema, by its dotted name."""
    hint: Any = build_schema()
    for part in key.split("."):
        hint = get_type_hints(hint).get(part) if is_dataclass(hint) else None
    return type(None) in get_args(hint)


def _missing_config(file: str, config_name: str, dirs: Sequence[Path]) -> str:
    group, _, name = file.removesuffix(".yaml").rpartition("/")
    known = sorted({option.stem for folder in dirs for option in (folder / group).glob("*.yaml")} - {"base"})
    asked = f"{group}={name}" if group else f"-cn {config_name}"
    if meaning := find_choice_hint(asked):
        return f"{asked}: no such choice; write {meaning}"
    check_not_removed(asked if group else config_name, asked)
    if group == "adapter" and (reason := UNSUPPORTED.get(name)):
        return f"{asked} is not supported: {reason}; give adapter=lora"
    near = [each for each in known if each.startswith(name)][:3] or difflib.get_close_matches(name, known, n=1)
    meant = f"did you mean {' or '.join(near)}? " if near else ""
    missing = f"{asked}: there is no conf/{file.removesuffix('.yaml')}.yaml"
    if not group:
        shipped = (CONF, *list_conf_folders())
        own = [each for each in known if not any((folder / f"{each}.yaml").is_file() for folder in shipped)]
        if own:
            others = pluralize(len(known) - len(own), "other")
            return f"{missing}; {meant}--config-dir has {', '.join(own)}, and conf/ {others}"
        return f"{missing}; {meant}conf/ has {len(known)} others; one in another folder needs --config-dir FOLDER"
    return f"{missing}; {meant}there are {', '.join(known)}"


def _is_unknown(key: str) -> bool:
    """Return whether an override names a key that there is not; one that adds or deletes a key does not, nor one inside
    a value of any type."""
    known = set(_known_keys())
    if key[:1] in "+~" or key in known or key.partition(".")[0] in _open_groups():
        return False
    above = key.rpartition(".")[0]
    while above and above not in known:
        above = above.rpartition(".")[0]
    return not above or any(each.startswith(f"{above}.") for each in known)


def _unknown_key(key: str) -> str:
    group, _, rest = key.partition(".")
    if rest and group in _open_groups():
        return f"unknown key '{key}'; to add a key to '{group}', write +{key}=..."
    check_not_removed(key, f"the key '{key}'")
    known = list(_known_keys())
    siblings = [name for name in known if rest and name.startswith(f"{group}.")]
    if hint := find_hint(key, siblings or known):
        return f"unknown key '{key}'; did you mean '{hint}'?"
    return f"unknown key '{key}'; " + (
        f"known are {', '.join(siblings)}" if siblings else "conf/base.yaml lists the known ones"
    )


def _first(pattern: str, text: str) -> str | None:
    match = re.search(pattern, text)
    return match[1] if match else None


def _known_keys(schema: type | None = None, prefix: str = "") -> Iterator[str]:
    schema = schema or build_schema()
    hints = get_type_hints(schema)
    for item in fields(schema):
        yield prefix + item.name
        if is_dataclass(hints[item.name]):
            yield from _known_keys(hints[item.name], f"{prefix}{item.name}.")


def _open_keys(schema: type = RunConfig, prefix: str = "") -> Iterator[str]:
    """Yield the keys inside groups that take any names, such as `logger.trackers`."""
    for name, hint in get_type_hints(schema).items():
        if get_origin(hint) is dict and prefix:
            yield prefix + name
        elif isinstance(hint, type) and is_dataclass(hint):
            yield from _open_keys(hint, f"{prefix}{name}.")


def _open_groups() -> set[str]:
    """Return the groups whose keys the schema does not list, names of evaluation files, and Hydra's own."""
    groups = {name for name, hint in get_type_hints(RunConfig).items() if get_origin(hint) is dict}
    return groups | {"eval_file", "hydra"}
