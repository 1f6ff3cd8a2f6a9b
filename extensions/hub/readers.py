"""The runs that read the keys of uploads."""

from __future__ import annotations

from extensions.hub.keys import HubConfig
from training.config.incompatible import CheckedConfig, Feature


def _uploads(run: CheckedConfig) -> bool:
    return run.config.read_group(HubConfig).repo_id is not None


READERS = dict.fromkeys(("hub.private", "hub.every"), Feature("hub.repo_id", _uploads, switches=("hub.repo_id",)))
