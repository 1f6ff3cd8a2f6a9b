"""Images: conversations about pictures, for vision-language models whose tower stays frozen."""

from __future__ import annotations

from pathlib import Path

from extension import Extension

EXTENSION = Extension(
    folder=Path(__file__).parent,
    keys={"data": "extensions.images.keys:DataKeys"},
    readers="extensions.images.refusals:READERS",
    refusals="extensions.images.refusals:ROWS",
    data_kinds="extensions.images.kinds:KINDS",
)
