"""The columns that the first stage reads of the images of a micro-batch: the tensors that the tower takes, and the
places of its vectors."""

from __future__ import annotations

import base64
import json
from functools import partial
from typing import Any

import torch
import xxhash
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from batch import Column, Per, Side
from data.loading.columns import ReadColumn, ReadRows
from errors import UserError
from extensions.images.pictures import Picture, open_image
from extensions.images.processor import ImageProcessor, open_processor

VECTOR_PLACES = "vector_places"  # int64 [N]: of the vectors of images, in the flattened tokens [B x T]
# int64 [B, W, 3]: of each token its frame, row and column, in families whose rotary angles take them
SPATIAL_IDS = "spatial_ids"


class ReadImages:
    """Reads the images of the rows of a micro-batch, once for all columns.

    data: the keys of `data`. path: the folder of the tokenizer, with the model's image processor.
    """

    def __init__(self, data: Any, path: str) -> None:
        self._data, self._path = data, path
        self._last: tuple[ReadRows, dict[str, Tensor]] | None = None

    def __call__(self, name: str, rows: ReadRows) -> Tensor:
        """Return a column by its name."""
        if self._last is None or self._last[0] is not rows:
            self._last = rows, self._read(rows)
        return self._last[1][name]

    def _read(self, rows: ReadRows) -> dict[str, Tensor]:
        processor = open_processor(self._path, self._data.image_backend)
        is_image = rows.whole == processor.image_token_id
        attached = [json.loads(each.content) for row in rows.ids for each in rows.rows.attachments(int(row))]
        places = is_image.flatten().nonzero().squeeze(1)
        count = sum(each["tokens"] for each in attached)
        if count != len(places):
            raise RuntimeError(f"{len(places)} tokens of images in a micro-batch whose images have {count}")
        found = {name: torch.empty(0) for name in processor.family.inputs}
        if attached:
            found = processor.process([self.open(each) for each in attached])
        columns = {VECTOR_PLACES: places} | {name: found[name] for name in processor.family.inputs}
        if processor.family.has_places:
            grids = list(found["image_grid_thw"]) if attached else []
            columns[SPATIAL_IDS] = _place_tokens(rows, is_image, grids, processor)
        return columns

    def open(self, attached: dict[str, Any]) -> Any:
        """Return an image. attached: as `Picture.write` keeps it. Raises UserError for one that is another by now."""
        picture = Picture(attached.get("path", ""), base64.b64decode(attached.get("content", "")))
        where = picture.path or "an image of the data"
        try:
            read = picture.read(where)
        except UserError:
            raise UserError(
                f"{picture.path} cannot be read, and could when it was tokenized; put it back, or remove data.cache_dir"
            ) from None
        if xxhash.xxh3_64_hexdigest(read) != attached["hash"]:
            raise UserError(
                f"{picture.path} is another file than when it was tokenized; put the former one back, or remove "
                "data.cache_dir"
            )
        return open_image(read, where, self._data.image_max_pixels, self._data.image_refuse_pixels)


def _place_tokens(rows: ReadRows, is_image: Tensor, grids: list[Tensor], processor: ImageProcessor) -> Tensor:
    """Return `SPATIAL_IDS` as the model of `transformers` computes them of each document alone. grids: of the images,
    in their order."""
    model, left = processor.build_positions(), iter(grids)
    placed = torch.zeros(*rows.whole.shape, 3, dtype=torch.int64)
    for number, row in enumerate(rows.ids):
        first, attachments = 0, rows.rows.attachments(int(row))
        for _, start, stop in rows.rows.pieces(int(row)):
            end = first + stop - start
            own = [next(left) for each in attachments if first <= each.start < end]
            positions, _ = model.get_rope_index(
                rows.whole[number : number + 1, first:end],
                mm_token_type_ids=is_image[number : number + 1, first:end].int(),
                image_grid_thw=torch.stack(own) if own else None,
            )
            placed[number, first:end] = positions[:, 0].T
            first = end
    return placed


def list_columns(data: Any, tokenizer: PreTrainedTokenizerBase) -> list[ReadColumn]:
    """Return the columns of images, in the order in which `Front` takes them. data: the keys of `data`."""
    read = ReadImages(data, tokenizer.name_or_path)
    family = open_processor(tokenizer.name_or_path, data.image_backend).family
    names = [VECTOR_PLACES, *([SPATIAL_IDS] if family.has_places else []), *family.inputs]
    return [
        ReadColumn(
            Column(name, torch.float32 if name == "pixel_values" else torch.int64, Per.batch, side=Side.first_stage),
            partial(read, name),
        )
        for name in names
    ]
