"""`plan=search`, which looks for the fastest layout."""

from __future__ import annotations

from pathlib import Path

from extension import Extension

EXTENSION = Extension(
    folder=Path(__file__).parent,
    plans={"search": "extensions.search.run:search"},
    refusals="extensions.search.refusals:ROWS",
)
