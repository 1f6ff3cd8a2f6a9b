"""What stands between the launcher's command line and Hydra's."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import get_type_hints

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from errors import UserError
from training.config import RunConfig

_CONFIG_NAME = re.compile(r"^(?:-cn|--config-name)(?:=(.+))?$")


def drop_launcher_arguments(argv: Sequence[str]) -> list[str]:
    """`argv` without the `--local_rank=N` that DeepSpeed's launcher puts there; Hydra would abort on it."""
    return [argument for argument in argv if not re.match(r"--local[-_]rank=", argument)]


def check_command_line(arguments: Sequence[str], config_dir: Path, default_config: str) -> None:
    """Composes the run's config once, so that a mistake is told in our words and not in a stack trace.

    Raises UserError for an unknown key (with the nearest known one), a value of the wrong type, a config that is not there, and
    for `--multirun`.
    """
    if {"-m", "--multirun"} & set(arguments):
        raise UserError(_multirun_message(arguments))
    config_name, overrides = _split_arguments(arguments, default_config)
    try:
        with initialize_config_dir(str(config_dir), version_base="1.3"):
            compose(config_name, overrides)
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(_explain(error, config_name, config_dir)) from None


def _split_arguments(arguments: Sequence[str], default_config: str) -> tuple[str, list[str]]:
    config_name, overrides, waiting = default_config, [], False
    for argument in arguments:
        match = _CONFIG_NAME.match(argument)
        if waiting:
            config_name, waiting = argument, False
        elif match:
            config_name, waiting = match[1] or config_name, match[1] is None
        elif not argument.startswith("-"):
            overrides.append(argument)
    return config_name.removesuffix(".yaml"), [override for override in overrides if "=" in override or override.startswith("~")]


def _explain(error: Exception, config_name: str, config_dir: Path) -> str:
    chain = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    text = "\n".join(str(link) for link in chain)
    if "Cannot find primary config" in text:
        known = sorted(file.stem for file in config_dir.glob("*.yaml") if file.stem != "base")
        return f"-cn {config_name}: there is no conf/{config_name}.yaml; there are {', '.join(known)}"
    if option := re.search(r"Could not find '(\w+)/(\w+)'", text):
        known = sorted(file.stem for file in (config_dir / option[1]).glob("*.yaml"))
        return f"{option[1]}={option[2]}: there is no conf/{option[1]}/{option[2]}.yaml; there are {', '.join(known)}"
    key = _first(r"Key '([^']+)' is not in struct|Key '([^']+)' not in", text)
    if key:
        full_key = _first(r"full_key: (\S+)", text) or key
        near = difflib.get_close_matches(full_key, _known_keys(), n=1) or difflib.get_close_matches(key, _known_keys(), n=1)
        return f"unknown key '{full_key}'" + (f"; did you mean '{near[0]}'?" if near else "; conf/base.yaml lists the known ones")
    full_key = _first(r"full_key: (\S+)", text)
    reason = str(chain[-1]).splitlines()[0]
    return f"{full_key}: {reason}" if full_key and full_key not in reason else reason


def _first(pattern: str, text: str) -> str | None:
    match = re.search(pattern, text)
    return next((group for group in match.groups() if group), None) if match else None


def _known_keys(schema: type = RunConfig, prefix: str = "") -> Iterator[str]:
    hints = get_type_hints(schema)
    for item in fields(schema):
        yield prefix + item.name
        if is_dataclass(hints[item.name]):
            yield from _known_keys(hints[item.name], f"{prefix}{item.name}.")


def _multirun_message(arguments: Sequence[str]) -> str:
    rest = [argument for argument in arguments if argument not in ("-m", "--multirun")]
    swept = next((argument for argument in rest if re.match(r"[^=]+=[^\[{]*,", argument)), "learning_rate=1e-4,3e-4")
    key, _, values = swept.partition("=")
    others = "".join(f"{argument} " for argument in rest if argument != swept)
    return (
        "--multirun would start several runs inside one launch; start one launch each instead: "
        f"for value in {values.replace(',', ' ')}; do deepspeed trainer_base_ds_mp.py {others}{key}=$value "
        f"output_dir=outputs/{key}-$value; done"
    )
