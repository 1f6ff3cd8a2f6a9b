"""The families of vision-language models: the tokens that stand for an image, and what their tower takes.

A tower is the part of `transformers`' own model that `get_image_features` runs: the vision tower and its projector.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import PretrainedConfig

from errors import UserError

Processed = Mapping[str, Any]  # what an image processor returns of a single image

IMAGE = ""  # in a list of tokens: the one that an image's vectors take the place of


@dataclass(frozen=True)
class Family:
    """How one `model_type` reads images.

    inputs: the names of what its image processor returns and its tower takes, `pixel_values` first. write: returns the
    tokens that stand for an image, as texts, `IMAGE` for each of its vectors. options: returns what the image
    processor is called with. has_places: tokens have a place in an image besides their position in the text: a frame, a
    row and a column, by which rotary angles are computed.
    """

    inputs: tuple[str, ...]
    write: Callable[[Processed, Any], list[str]]
    options: Callable[[Any], dict[str, Any]] = field(default=lambda config: {})
    has_places: bool = False


def _write_grid(processed: Processed, config: Any) -> list[str]:
    frames, height, width = (int(each) for each in processed["image_grid_thw"][0])
    return [IMAGE] * (frames * height * width // config.vision_config.spatial_merge_size**2)


def _write_rows(processed: Processed, config: Any) -> list[str]:
    height, width = (int(each) // _count_side(config) for each in processed["image_sizes"][0])
    return [*([*[IMAGE] * width, "[IMG_BREAK]"] * height)[:-1], "[IMG_END]"]


def _count_side(config: Any) -> int:
    """Return the pixels of a side of what becomes one vector."""
    return config.vision_config.patch_size * config.spatial_merge_size


def _write_tiles(processed: Processed, config: Any) -> list[str]:
    vision, (height, width) = config.vision_config, config.vision_config.image_size
    patches = (height // vision.patch_size[0]) * (width // vision.patch_size[1])
    count = round(patches * config.downsample_ratio**2) * int(processed["num_patches"][0])
    return ["<img>", *[IMAGE] * count, "</img>"]


_QWEN = Family(("pixel_values", "image_grid_thw"), _write_grid, has_places=True)
FAMILIES: dict[str, Family] = {
    "internvl": Family(("pixel_values",), _write_tiles, lambda config: {"crop_to_patches": True}),
    "mistral3": Family(
        ("pixel_values", "image_sizes"),
        _write_rows,
        lambda config: {"patch_size": {"height": _count_side(config), "width": _count_side(config)}},
    ),
    **dict.fromkeys(("qwen2_5_vl", "qwen3_5", "qwen3_vl", "qwen3_vl_moe"), _QWEN),
}


def find_family(config: PretrainedConfig, where: str) -> Family:
    """Return the family of a whole model's config. where: what the error begins with. Raises UserError for a model
    without one."""
    if config.model_type not in FAMILIES:
        raise UserError(
            f"{where}: data=image_chat trains {', '.join(sorted(FAMILIES))}, not a '{config.model_type}'; give such a "
            "model, or data=chat"
        )
    return FAMILIES[config.model_type]
