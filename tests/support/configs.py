"""A run's config for a test: `conf/base.yaml`, or another primary config, with overrides."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import is_dataclass
from enum import Enum
from functools import cache, reduce
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from training.config import schema
from training.config.schema import RunConfig

ROOT = Path(__file__).resolve().parents[2]
CONF = ROOT / "conf"
REQUIRED = ("model_name_or_path=model", "train_file=train.jsonl", "output_dir=out")


def prepare_hydra_once() -> None:
    """Lets OmegaConf read a config of the project once, and again when the file has changed, and Hydra learn the schema
    once: a composed config is made of fifteen files, and both take most of its time. Called before other modules import
    `register_schema`."""
    schema.register_schema = cache(schema.register_schema)
    read, known = OmegaConf.load, dict[tuple[Path, int, int], Any]()

    def load(file: Any) -> Any:
        path = Path(file if isinstance(file, str | Path) else str(getattr(file, "name", ""))).resolve()
        if ROOT not in path.parents or not path.is_file():
            return read(file)
        state = path.stat()
        key = path, state.st_mtime_ns, state.st_size
        if key not in known:
            known[key] = read(file)
        return deepcopy(known[key])

    OmegaConf.load = load


def compose_config(name: str, *overrides: str) -> DictConfig:
    """Returns what Hydra composes. Composing takes a tenth of a second and more, and hundreds of tests need a config,
    so each choice of groups is composed once, and values are set on copies of it, as Hydra sets them."""
    parsed = [_parse(override) for override in overrides]
    groups = [override for override, read in zip(overrides, parsed) if (CONF / read.key_or_group).is_dir()]
    values = [read for read in parsed if not (CONF / read.key_or_group).is_dir()]
    composed = deepcopy(_compose(name, tuple(groups)))
    try:
        for read in values:
            key, is_there = read.key_or_group, OmegaConf.select(composed, read.key_or_group) is not None
            if (is_there and read.is_add()) or read.is_delete() or read.is_force_add() or read.package is not None:
                return _compose(name, overrides)
            OmegaConf.update(composed, key, read.value(), merge=True, force_add=read.is_add())
    except OmegaConfBaseException:
        return _compose(name, overrides)  # with the error that Hydra makes of it
    return composed


@cache
def _parse(override: str) -> Override:
    return OverridesParser.create().parse_override(override)


@cache
def _compose(name: str, overrides: tuple[str, ...]) -> DictConfig:
    schema.register_schema()
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose(name, list(overrides))


def build_config(*overrides: str) -> RunConfig:
    return OmegaConf.to_object(compose_config("base", *REQUIRED, *overrides))


def set_keys(config: RunConfig, *overrides: str) -> RunConfig:
    """A copy of a typed config with some keys changed, without Hydra, which takes a good part of a second.

    Of a group (`data=pretrain`) the name alone is changed, not the keys that its file sets.
    """
    changed = deepcopy(config)
    for override in overrides:
        key, _, text = override.partition("=")
        *parents, name = key.split(".")
        parent: Any = reduce(getattr, parents, changed)
        if is_dataclass(getattr(parent, name)):
            parent, name = getattr(parent, name), "name"
        hint = get_type_hints(type(parent))[name]
        value, kinds = yaml.safe_load(text), [kind for kind in (hint, *get_args(hint)) if isinstance(kind, type)]
        enum = next((kind for kind in kinds if issubclass(kind, Enum)), None)
        setattr(parent, name, enum(value) if enum and value is not None else float(value) if hint is float else value)
    return changed
