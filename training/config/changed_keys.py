"""The keys whose values changed between two starts of a run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from masking import mask
from training.config.schema import RunConfig

# What a resume gives anew, and what another number of ranks changes with it
_OF_A_START = {"resume", "resume_allow_changes", "output_dir", "overwrite_output_dir", "world_size"}


def write_config(config: RunConfig) -> str:
    """Return the text of a run's config.yaml, without secrets."""
    return OmegaConf.to_yaml(mask(OmegaConf.to_container(OmegaConf.structured(config))))


def list_changed_keys(file: Path, config: RunConfig) -> list[str]:
    """Return in words the keys that have other values than in a config.yaml; none if there is no such file, or if it
    cannot be read."""
    try:
        saved = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return []
    if not isinstance(saved, dict):
        return []
    before, after = dict(_list_keys(saved)), dict(_list_keys(yaml.safe_load(write_config(config))))
    return [
        f"{key} was {before[key]}, is {value}"
        for key, value in after.items()
        if key not in _OF_A_START and key in before and before[key] != value
    ]


def _list_keys(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from _list_keys(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
