"""Trackers beside those of the core. README.md says where each of them writes."""

from __future__ import annotations

from pathlib import Path

from extension import Extension

NAMES = ("comet", "mlflow", "swanlab", "trackio")
EXTENSION = Extension(
    folder=Path(__file__).parent,
    hints={f"use_{name}": f"logger={name}" for name in NAMES},
    aliases={f"training.trackers.{name}": f"extensions.trackers.{name}" for name in NAMES},  # since version 2.0
)
