"""A run's config for a test: `conf/base.yaml`, or another primary config, with overrides."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import is_dataclass
from enum import Enum
from functools import reduce
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from training.config.schema import RunConfig, register_schema

CONF = Path(__file__).resolve().parents[2] / "conf"
REQUIRED = ("model_name_or_path=model", "train_file=train.jsonl", "output_dir=out")


def compose_config(name: str, *overrides: str) -> DictConfig:
    register_schema()
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
