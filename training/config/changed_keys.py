"""The keys whose values changed between two starts of a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import is_dataclass
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
    changed = _compare(saved, yaml.safe_load(write_config(config)), config)
    return [f"{key} was {before}, is {after}" for key, before, after in changed if key not in _OF_A_START]


def _compare(
    before: dict[str, Any], after: dict[str, Any], node: object, prefix: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """Yield key, value before and value after. node: the part of the config that `after` is. A key of ours that is not
    in `before` is one that an earlier version did not know."""
    for name in after if is_dataclass(node) else {**before, **after}:
        if is_dataclass(node) and name not in before:
            continue
        old, new = before.get(name), after.get(name)
        inner = getattr(node, name, None) if is_dataclass(node) else None
        if isinstance(old, dict) and isinstance(new, dict):
            yield from _compare(old, new, inner, f"{prefix}{name}.")
        elif old != new:
            yield f"{prefix}{name}", old, new
