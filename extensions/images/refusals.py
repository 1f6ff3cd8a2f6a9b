"""What runs with images do not go together with, and the runs that read their keys."""

from __future__ import annotations

from training.config.incompatible import Row, has_value

IMAGES = has_value("data.name", "image_chat")
ROWS: tuple[Row, ...] = ()
READERS = dict.fromkeys(
    (
        "data.images_field",
        "data.image_folder",
        "data.image_backend",
        "data.image_max_pixels",
        "data.image_refuse_pixels",
    ),
    IMAGES,
)
