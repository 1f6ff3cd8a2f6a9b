"""The kind of data that has images."""

from __future__ import annotations

from data.encoders.kind import DataKind
from extensions.images.encoder import ImageChatEncoder

KINDS = (
    DataKind(
        "image_chat",
        ImageChatEncoder,
        task="sft",
        columns="extensions.images.columns:list_columns",
        front="extensions.images.tower:build_front",
        format_version=2,
        not_split="a cut may go through an image",
        not_streamed="its images are found by the number of their sample",
    ),
)
