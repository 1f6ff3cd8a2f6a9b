"""What the first stage reads of the images of a micro-batch: the tensors that the tower takes, and where its vectors
belong."""

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
from extensions.images.processor import open_processor

PLACES = "image_places"


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
        attached = [json.loads(each.content) for row in rows.ids for each in rows.rows.attachments(int(row))]
        places = (rows.whole == processor.image_token_id).flatten().nonzero().squeeze(1)
        count = sum(each["tokens"] for each in attached)
        if count != len(places):
            raise RuntimeError(f"{len(places)} tokens of images in a micro-batch whose images have {count}")
        if not attached:
            return {PLACES: places} | {name: torch.empty(0) for name in processor.family.inputs}
        processed = processor.process([self._open(each) for each in attached])
        return {PLACES: places} | {name: processed[name] for name in processor.family.inputs}

    def _open(self, attached: dict[str, Any]) -> Any:
        picture = Picture(attached.get("path", ""), base64.b64decode(attached.get("content", "")))
        where = picture.path or "an image of train_file"
        read = picture.read(where)
        if xxhash.xxh3_64_hexdigest(read) != attached["hash"]:
            raise UserError(
                f"{picture.path} is another file than when it was tokenized; put the former one back, or remove "
                "data.cache_dir"
            )
        return open_image(read, where, self._data.image_max_pixels, self._data.image_refuse_pixels)


def list_columns(data: Any, tokenizer: PreTrainedTokenizerBase) -> list[ReadColumn]:
    """Return the columns of images, in the order in which `Front` takes them. data: the keys of `data`."""
    read = ReadImages(data, tokenizer.name_or_path)
    family = open_processor(tokenizer.name_or_path, data.image_backend).family
    dtypes = {PLACES: torch.int64, "pixel_values": torch.float32}
    return [
        ReadColumn(Column(name, dtypes.get(name, torch.int64), Per.batch, side=Side.first_stage), partial(read, name))
        for name in (PLACES, *family.inputs)
    ]
