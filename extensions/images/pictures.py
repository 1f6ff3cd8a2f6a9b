"""Where a record has its images, and how they are opened: paths, data URIs, and bytes of a column."""

from __future__ import annotations

import base64
import binascii
import io
import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import xxhash

from data.encoders.messages import TEXT_PART
from data.encoders.segments import check_text
from errors import UserError

if TYPE_CHECKING:
    from PIL.Image import Image

FIRST_MARK, MOST_IMAGES = 0x10E000, 0x1000  # private characters: that of each image of a record
PLACE = "<image>"  # in a text: the place of an image, as LLaMA-Factory has it
IMAGE_PARTS = ("image", "image_url")
# Of a part, the keys that may hold its image: of transformers' templates, of OpenAI's, and of data sets
SOURCES = ("image", "path", "url", "image_url", "bytes")


@dataclass(frozen=True)
class Picture:
    """An image of a record, not opened. path: absolute; empty for one whose bytes the record has. content: these."""

    path: str = ""
    content: bytes = b""

    def read(self, where: str) -> bytes:
        """Return the bytes of the file. Raises UserError naming `where`."""
        if not self.path:
            return self.content
        try:
            return Path(self.path).read_bytes()
        except (OSError, ValueError) as error:  # ValueError of a path with a zero byte
            reason = getattr(error, "strerror", None) or str(error)
            raise UserError(
                f"{where}: image {self.path} cannot be read ({reason}); correct the path, give "
                "data.image_folder, or remove the record"
            ) from None

    def write(self, tokens: int, read: bytes) -> str:
        """Return what is kept of it beside its tokens, JSON text. tokens: how many stand for it. read: its bytes."""
        kept = {"path": self.path} if self.path else {"content": base64.b64encode(self.content).decode()}
        return json.dumps(kept | {"tokens": tokens, "hash": xxhash.xxh3_64_hexdigest(read)}, ensure_ascii=False)


def open_image(read: bytes, where: str, max_pixels: int | None, refuse_pixels: int) -> Image:
    """Return an image in RGB, as it is meant to be looked at, and with at most `max_pixels` pixels. Raises UserError
    naming `where` for what is no image, for one that is cut off, and for one of more than `refuse_pixels`."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    Image.MAX_IMAGE_PIXELS = None  # the limit is `refuse_pixels`
    try:
        image = Image.open(io.BytesIO(read))
        if image.width * image.height > refuse_pixels:
            raise UserError(
                f"{where}: has {image.width} x {image.height} pixels, and data.image_refuse_pixels={refuse_pixels}; "
                "make it smaller, or raise that"
            )
        turned = ImageOps.exif_transpose(image).convert("RGB")
    except UserError:
        raise
    except UnidentifiedImageError:
        raise UserError(f"{where}: is no image; correct the file, or remove the record") from None
    except Exception as error:  # of a decoder: OSError, ValueError, SyntaxError, and those of its own
        reason = " ".join(str(error).split())[:120] or type(error).__name__
        raise UserError(f"{where}: cannot be decoded ({reason}); correct the file, or remove the record") from None
    if max_pixels is not None and turned.width * turned.height > max_pixels:
        scale = math.sqrt(max_pixels / (turned.width * turned.height))
        size = max(1, int(turned.width * scale)), max(1, int(turned.height * scale))
        turned = turned.resize(size, Image.Resampling.BICUBIC)
    return turned


class Slot(NamedTuple):
    """A place of a record that may hold images. where: as errors name it. content: a text, or the parts of one; of any
    other type in a record that is found to be bad later."""

    where: str
    content: Any
    is_answer: bool = False


def take_pictures(slots: Sequence[Slot], given: Any, location: str, folder: Path) -> tuple[list[Any], list[Picture]]:
    """Return the contents of the slots with a mark (`mark`) in place of each image, and the images by the numbers of
    their marks.

    given: the images of the record, for the places in texts and for the parts that have none of their own. folder:
    where relative paths begin. Raises UserError naming a place, or `location`.
    """
    others = given if isinstance(given, list) else [] if given is None else [given]
    left = iter([_read_source(each, f"{location}: image {number}", folder) for number, each in enumerate(others, 1)])
    pictures: list[Picture] = []

    def mark_piece(piece: str | Picture | None, slot: Slot) -> str:
        if isinstance(piece, str):
            return piece
        if slot.is_answer:
            raise UserError(f"{slot.where}: an assistant turn has an image, and answers are text; remove it there")
        found = next(left, None) if piece is None else piece
        if found is None:
            raise UserError(
                f"{slot.where}: has a place for an image that the record does not have; add the image, or remove the "
                "place"
            )
        if len(pictures) == MOST_IMAGES:
            raise UserError(f"{location}: more than {MOST_IMAGES:,} images; split the record")
        pictures.append(found)
        return mark(len(pictures) - 1)

    marked = []
    for slot in slots:
        pieces = list(_list_parts(slot, bool(others), folder))
        marked.append("".join(mark_piece(piece, slot) for piece in pieces) if pieces else slot.content)
    if (unused := sum(1 for _ in left)) > 0:
        raise UserError(
            f"{location}: {unused} of its {len(others)} images have no place in the text; write '{PLACE}' where each "
            "belongs, or remove them"
        )
    return marked, pictures


def mark(number: int) -> str:
    """Return the character that stands for an image of a record, by its number."""
    return chr(FIRST_MARK + number)


def find_mark(text: Any) -> int | None:
    """Return the number of the image that a text is the mark of; None for any other text."""
    is_mark = isinstance(text, str) and len(text) == 1 and 0 <= ord(text) - FIRST_MARK < MOST_IMAGES
    return ord(text) - FIRST_MARK if is_mark else None


def _list_parts(slot: Slot, has_images: bool, folder: Path) -> Iterator[str | Picture | None]:
    """Yield the texts and images of a slot, in order; None for an image that the record has elsewhere, and nothing for
    what is neither a text nor a list. has_images: whether it has some, so that `PLACE` in a text is one of them."""
    content, where = slot.content, slot.where
    for part in content if isinstance(content, list) else [content] if isinstance(content, str) else ():
        kind = part.get("type", TEXT_PART) if isinstance(part, dict) else TEXT_PART
        if kind == TEXT_PART:
            text = check_text(part.get("text") if isinstance(part, dict) else part, f"{where}: a part of its content")
            if any(find_mark(character) is not None for character in text):
                raise UserError(f"{where} has a private character (U+10E000 to U+10EFFF); remove it")
            first, *rest = text.split(PLACE) if has_images else [text]
            yield first
            for each in rest:
                yield from (None, each)
        elif isinstance(part, dict) and kind in IMAGE_PARTS:
            source = next((part[key] for key in SOURCES if part.get(key) is not None), None)
            yield None if source is None else _read_source(source, f"{where}: its image", folder)
        else:
            raise UserError(
                f"{where} has a part of type '{kind}', and data=image_chat reads text and images; remove the part, or "
                "the record"
            )


def _read_source(source: Any, where: str, folder: Path) -> Picture:
    """Return the image that a record names: a path, a data URI, or an object with one, or with bytes in base64."""
    if isinstance(source, dict):
        source = next((value for key in ("bytes", "path", "url") if (value := source.get(key))), None)
    if not isinstance(source, str) or not source:
        raise UserError(f"{where} must be a path or a data URI, not {type(source).__name__}; fix or remove the record")
    if source.startswith("data:"):
        head, _, encoded = source.partition(",")
        try:
            if not head.endswith(";base64"):
                raise ValueError
            return Picture(content=base64.b64decode(encoded, validate=True))
        except (ValueError, binascii.Error):
            raise UserError(f"{where} is a data URI that is not base64; fix or remove the record") from None
    if source.lower().startswith(("http://", "https://")):
        raise UserError(f"{where} is an address, {source[:60]}; download it, and give its path")
    path = Path(os.path.expanduser(source.removeprefix("file://")))
    return Picture(path=str(path if path.is_absolute() else (folder / path).absolute()))
