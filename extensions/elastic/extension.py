"""`scripts/supervise.py --elastic`, which continues a run on the hosts that are left."""

from __future__ import annotations

from pathlib import Path

from extension import Extension

EXTENSION = Extension(
    folder=Path(__file__).parent,
    options={
        "--elastic": "continue on the hosts that are left",
        "--hosts_command COMMAND": "with --elastic: prints the hosts that are left, 'NAME slots=N' a line",
    },
    starter="extensions.elastic.starter:open_elastic",
)
