"""Conversations about images: those of `data=chat`, with the tokens that stand for an image where it has its place.

The chat template writes what it writes for an image of one size, and the token for a vector of it is repeated for each
vector, as the model's processor in `transformers` does. No token of an image is a target.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar

import xxhash
from transformers import PreTrainedTokenizerBase

from data.counts import ContentCounts
from data.encoders.chat import ChatEncoder
from data.encoders.messages import ALPACA_FIELDS, ASSISTANT, SHAREGPT_FIELD, SHAREGPT_ROLES, TEXT_PART
from data.encoders.rendering import Renderer
from data.encoders.segments import Piece, Pieces
from errors import UserError
from extensions.images.options import ImageBackend
from extensions.images.pictures import IMAGE_PARTS, Picture, Slot, find_mark, open_image, take_pictures
from extensions.images.processor import ImageProcessor, open_processor

# What has a content, the key of it there, what errors call it, and its role
Holder = tuple[Any, Any, str, str]


@dataclass(frozen=True)
class ImageChatEncoder(ChatEncoder):
    """`ChatEncoder` for records some of which have images. The fields are keys of `data`."""

    attaches: ClassVar[bool] = True
    images_field: str = "images"
    image_folder: str = "."
    image_backend: ImageBackend = ImageBackend.pil
    image_max_pixels: int | None = None
    image_refuse_pixels: int = 100_000_000

    def split(
        self, record: dict, location: str, tokenizer: PreTrainedTokenizerBase, counts: ContentCounts
    ) -> list[Pieces]:
        """Return the pieces of each sample. Raises `UserError` naming `location` for what `ChatEncoder` refuses, and
        for images that cannot be read or have no place."""
        text_only, pictures = self._take_pictures(record, location, tokenizer)
        samples = super().split(text_only, location, tokenizer, counts)
        processor = open_processor(tokenizer.name_or_path, self.image_backend)
        images = [
            self._encode(each, f"{location}: image {n}", processor, tokenizer) for n, each in enumerate(pictures, 1)
        ]
        return [self._put_images(pieces, images, location, tokenizer, processor) for pieces in samples]

    def describe_attachments(self, tokenizer: PreTrainedTokenizerBase) -> str:
        """Return a hash of the model's image processor, by which tokenized data are found again."""
        processor = open_processor(tokenizer.name_or_path, self.image_backend)
        options = json.dumps(processor.family.options(processor.config), sort_keys=True)
        return xxhash.xxh3_64_hexdigest(f"{processor.processor.to_json_string()}{options}".encode())

    def identify(self, content: str) -> str:
        """Return the hash of an image. content: of its attachment."""
        return json.loads(content)["hash"]

    def _take_pictures(
        self, record: dict, location: str, tokenizer: PreTrainedTokenizerBase
    ) -> tuple[dict, list[Picture]]:
        """Return the record with marks in place of its images, and these."""
        for field in ("images", "image"):
            if record.get(field) and field not in (self.images_field, self.messages_field):
                raise UserError(
                    f"{location}: the record has images in '{field}', and data.images_field={self.images_field}; "
                    f"give data.images_field={field}, or remove the field"
                )
        changed = {name: value for name, value in record.items() if name != self.images_field}
        holders = list(self._list_holders(changed))
        slots = []
        for holder, key, where, role in holders:
            content = holder[key]
            if role == "user" and _is_text_before_image(content) and _puts_image_first(tokenizer):
                content = content[::-1]
            slots.append(Slot(f"{location}: {where}", content, role == ASSISTANT))
        contents, pictures = take_pictures(slots, record.get(self.images_field), location, Path(self.image_folder))
        for (holder, key, _, _), content in zip(holders, contents, strict=True):
            holder[key] = content
        return changed, pictures

    def _list_holders(self, record: dict) -> Iterator[Holder]:
        """Yield what has a content, in the order of the conversation. Of the layouts that a record could be of, it is
        the one that `ChatEncoder` reads. Lists in `record` are copied first, so that they may be changed."""
        if self.messages_field in record:
            yield from _list_messages(record, self.messages_field)
        elif SHAREGPT_FIELD in record:
            yield from _list_texts(record, "system")
            yield from _list_messages(record, SHAREGPT_FIELD, "value")
        elif all(name in record for name in ALPACA_FIELDS):
            yield from _list_texts(record, "system")
            history = record.get("history")
            if isinstance(history, list) and all(isinstance(turn, list) and len(turn) == 2 for turn in history):
                record["history"] = [list(turn) for turn in history]
                for number, turn in enumerate(record["history"], start=1):
                    yield turn, 0, f"turn {number} of its history", "user"
                    yield turn, 1, f"turn {number} of its history", ASSISTANT
            yield from _list_texts(record, ALPACA_FIELDS[0], "input")
        else:
            for field in (self.prompt_field, self.completion_field):
                yield from _list_messages(record, field)
                if field == self.prompt_field:
                    yield from _list_texts(record, field)

    def _encode(
        self, picture: Picture, where: str, processor: ImageProcessor, tokenizer: PreTrainedTokenizerBase
    ) -> Piece:
        """Return the tokens that stand for an image."""
        read = picture.read(where)
        image = open_image(read, where, self.image_max_pixels, self.image_refuse_pixels)
        try:
            processed = processor.process([image])
        except Exception as error:  # of the processor: a strip that is too long for it
            reason = " ".join(str(error).split())[:160]
            raise UserError(f"{where}: the model's image processor refuses it ({reason}); remove the record") from None
        token_ids = processor.list_tokens(processed, tokenizer)
        return Piece(
            token_ids, is_target=False, attachment=picture.write(token_ids.count(processor.image_token_id), read)
        )

    def _put_images(
        self,
        pieces: Pieces,
        images: list[Piece],
        location: str,
        tokenizer: PreTrainedTokenizerBase,
        processor: ImageProcessor,
    ) -> Pieces:
        """Return the pieces of a sample with images in place of their marks. Raises UserError for a text that the
        tokenizer reads as the token of an image."""
        token = str(tokenizer.convert_ids_to_tokens(processor.image_token_id))
        for piece in pieces:
            if isinstance(piece.content, str) and token in piece.content:
                raise UserError(
                    f"{location}: has '{token}' in a text, where no image belongs to it; remove it, or give "
                    "data.control_tokens=text"
                )
        before, after = _find_frame(tokenizer, token) if images else ("", "")
        put: Pieces = []
        for piece in pieces:
            number = find_mark(piece.content)
            shown = [piece] if number is None else [Piece(before, False), images[number], Piece(after, False)]
            first, *others = [each for each in shown if each.content] or [piece]
            put += [first._replace(first_label=piece.first_label), *others]
        return list(_join_texts(put))


def _list_messages(record: dict, field: str, key: str = "content") -> Iterator[Holder]:
    """Yield the messages of a field, where it is a list of them. key: that of their content."""
    if isinstance(record.get(field), list):
        record[field] = [dict(each) if isinstance(each, dict) else each for each in record[field]]
        for number, message in enumerate(record[field], start=1):
            if isinstance(message, dict) and key in message:
                role = message.get("role") if key == "content" else SHAREGPT_ROLES.get(str(message.get("from")))
                yield message, key, f"message {number}", str(role)


def _list_texts(record: dict, *fields: str) -> Iterator[Holder]:
    """Yield the fields that are texts of the user."""
    for field in fields:
        if isinstance(record.get(field), str):
            yield record, field, f"field '{field}'", "user"


def _is_text_before_image(content: Any) -> bool:
    """Return whether a content is a text and an image, as two parts in this order."""
    kinds = [each.get("type") if isinstance(each, dict) else None for each in content if isinstance(content, list)]
    return len(kinds) == 2 and kinds[0] == TEXT_PART and kinds[1] in IMAGE_PARTS


@lru_cache(maxsize=4)
def _puts_image_first(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the chat template shows an image before the text of a turn that has both in the other order, as
    those of Mistral do for a single text with a single image."""
    renderer, parts = Renderer(tokenizer, "data.chat_template"), [{"type": "text", "text": "a"}, {"type": "image"}]
    as_given, turned = (renderer.try_render([{"role": "user", "content": each}]) for each in (parts, parts[::-1]))
    return as_given is not None and as_given == turned


def _join_texts(pieces: Pieces) -> Iterator[Piece]:
    """Yield the pieces with neighbouring texts in one, so that their letters become the tokens that they become
    together."""
    for (is_text, *_), together in groupby(pieces, lambda each: (isinstance(each.content, str), each[1:])):
        found = list(together)
        if is_text and all(each.first_label is None for each in found[1:]):
            content = "".join(str(each.content) for each in found)
            if content:
                yield found[0]._replace(content=content)
        else:
            yield from found


@lru_cache(maxsize=4)
def _find_frame(tokenizer: PreTrainedTokenizerBase, token: str) -> tuple[str, str]:
    """Return what the chat template writes before and after the token of an image. Raises UserError for a template that
    does not write it once for an image."""
    renderer, text = Renderer(tokenizer, "data.chat_template"), {"type": "text", "text": "a text"}
    with_image, without = (
        renderer.render([{"role": "user", "content": parts}])
        for parts in ([text, {"type": "image"}, text], [text, text])
    )
    start = next((place for place, (one, two) in enumerate(zip(with_image, without)) if one != two), len(without))
    frame = with_image[start : start + len(with_image) - len(without)]
    if frame.count(token) != 1:
        raise UserError(
            f"data.chat_template: it does not write '{token}' for an image; give the model's own template "
            "(data.chat_template=null)"
        )
    before, _, after = frame.partition(token)
    return before, after
