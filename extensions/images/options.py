"""The choices of the keys of images, as the data side reads them."""

from __future__ import annotations

from enum import Enum


class ImageBackend(Enum):
    """The library by which the model's image processor resizes: pixels differ between the two."""

    pil = "pil"
    torchvision = "torchvision"
