"""Configs of other trainers, read as ones of this project."""

from __future__ import annotations

from pathlib import Path

from extension import Extension

EXTENSION = Extension(
    folder=Path(__file__).parent,
    commands={"python -m extensions.import_config THEIRS -o conf/mine.yaml": "a config of another trainer"},
)
