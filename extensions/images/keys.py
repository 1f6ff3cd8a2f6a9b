"""The keys of data with images."""

from __future__ import annotations

from dataclasses import dataclass

from extensions.images.options import ImageBackend
from training.config.ranges import positive


@dataclass
class DataKeys:
    """Further keys of `data`."""

    images_field: str | None = None  # field of a record with its images, in the order of their places in the text
    image_folder: str = "."  # where relative paths of images begin
    image_backend: ImageBackend = ImageBackend.pil  # torchvision: the group `images` of pyproject.toml
    # Pixels of an image (width x height): those with more are made smaller, in their shape, before the model's own
    # processor takes them. null: only as that does
    image_max_pixels: int | None = positive(default=None)
    image_refuse_pixels: int = positive(default=100_000_000)  # an image with more is a bad record
