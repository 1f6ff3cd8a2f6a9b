"""Records about images: the tokens that they become, what is kept beside them, and errors of bad ones."""

from __future__ import annotations

import base64
import io
import json
import re
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.images import FAMILIES, load_plain, save_model
from transformers import AutoImageProcessor, AutoTokenizer, PreTrainedTokenizerBase

from data.encoders.kinds import find_kind
from data.options import LengthPolicy, OnBadRecord
from data.sample import IGNORE_INDEX, Sample
from data.sources.formats import RawRecord
from data.storage.encoding import Encoding, encode_batch
from data.storage.tokenized import TokenizedDataset, TokenizedWriter
from errors import UserError
from extensions.images.columns import ReadImages
from extensions.images.encoder import ImageChatEncoder
from extensions.images.options import ImageBackend
from extensions.inspection.findings import hash_samples
from models.weights.sources import open_weights
from scripts.generate import load_model

ANSWER = {"role": "assistant", "content": "Two."}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("image_records")
    for model_type in FAMILIES:
        save_model(root / model_type, model_type)
    for name, size in {"small": (40, 24), "wide": (88, 30), "tall": (25, 64)}.items():
        pixels = np.random.default_rng(len(name)).integers(0, 256, (*size[::-1], 3), dtype=np.uint8)
        Image.fromarray(pixels).save(root / f"{name}.png")
    return root


def load_tokenizer(root: Path, model_type: str = "qwen2_5_vl") -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(root / model_type)


def encode(root: Path, record: dict[str, Any], model_type: str = "qwen2_5_vl", **options: Any) -> Sample:
    encoder = ImageChatEncoder(image_folder=str(root), **options)
    return encoder.encode(record, "chat.jsonl:7", load_tokenizer(root, model_type))


def ask(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}, ANSWER]}


def show(name: str) -> dict[str, str]:
    return {"type": "image", "image": f"{name}.png"}


def say(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def expand(root: Path, model_type: str, name: str) -> str:
    """Return the tokens of an image, as the processors of `transformers` write them."""
    options: dict[str, Any] = {"internvl": {"crop_to_patches": True}}.get(model_type, {})
    if model_type == "mistral3":
        options = {"patch_size": {"height": 16, "width": 16}}
    processor = AutoImageProcessor.from_pretrained(root / model_type, backend="pil")
    found = processor([Image.open(root / f"{name}.png").convert("RGB")], return_tensors="pt", **options)
    if model_type == "internvl":
        return f"<img>{'<IMG_CONTEXT>' * 4 * int(found['num_patches'][0])}</img>"
    if model_type == "mistral3":
        height, width = (int(each) // 16 for each in found["image_sizes"][0])
        return ("[IMG]" * width + "[IMG_BREAK]") * (height - 1) + "[IMG]" * width + "[IMG_END]"
    return "<|image_pad|>" * (int(torch.as_tensor(found["image_grid_thw"]).prod()) // 4)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_tokens_are_those_of_the_processor(root: Path, model_type: str) -> None:
    tokenizer, token = load_tokenizer(root, model_type), FAMILIES[model_type][0]
    record = ask(say("Compare "), show("small"), show("wide"), say(" with"), show("tall"), say("\nHow many?"))
    text = tokenizer.apply_chat_template(record["messages"], tokenize=False)
    pieces = text.split(token)
    assert len(pieces) == 4
    names = ("small", "wide", "tall")
    images = [expand(root, model_type, name) for name in names]
    whole = pieces[0] + "".join(image + piece for image, piece in zip(images, pieces[1:], strict=True))
    sample = encode(root, record, model_type)
    assert tokenizer.decode(sample["input_ids"]) == whole
    prompt, _, answer = whole.partition("A: ")
    asked = tokenizer(prompt + "A: ", add_special_tokens=False)["input_ids"]
    assert sample["input_ids"][: len(asked)] == asked
    assert tokenizer.decode([label for label in sample["labels"] if label != IGNORE_INDEX]) == answer
    for attached, image, name in zip(sample["attachments"], images, names, strict=True):
        ids = sample["input_ids"][attached.start : attached.stop]
        assert tokenizer.decode(ids) == image
        kept = json.loads(attached.content)
        assert kept["path"] == str(root / f"{name}.png") and kept["tokens"] == image.count(token)


def test_layouts_are_one_conversation(root: Path) -> None:
    expected = encode(root, ask(say("Count"), show("small"), say("these"), show("wide")))
    paths, text = ["small.png", "wide.png"], "Count<image>these<image>"
    asked = {"messages": [{"role": "user", "content": text}, ANSWER], "images": paths}
    assert encode(root, asked) == expected
    parts = ask(say("Count"), {"type": "image"}, say("these"), {"type": "image"}) | {"images": paths}
    assert encode(root, parts) == expected
    turns = [{"from": "human", "value": text}, {"from": "gpt", "value": "Two."}]
    assert encode(root, {"conversations": turns, "images": paths}) == expected
    assert encode(root, {"instruction": text, "output": "Two.", "images": paths}) == expected
    assert encode(root, {"prompt": text, "completion": "Two.", "images": paths}) == expected
    assert (
        encode(root, {"talk": asked["messages"], "seen": paths}, messages_field="talk", images_field="seen") == expected
    )
    url = {"type": "image_url", "image_url": {"url": f"file://{root}/small.png"}}
    assert encode(root, ask(say("Count"), url, say("these"), show("wide"))) == expected
    data = "data:image/png;base64," + base64.b64encode((root / "small.png").read_bytes()).decode()
    for source in (data, {"bytes": data}):
        embedded = encode(root, ask(say("Count"), {"type": "image", "image": source}, say("these"), show("wide")))
        assert embedded["input_ids"] == expected["input_ids"]
        assert "content" in json.loads(embedded["attachments"][0].content)


def list_names(sample: Sample) -> list[str]:
    return [Path(json.loads(each.content)["path"]).stem for each in sample["attachments"]]


def test_images_have_the_order_of_the_conversation(root: Path) -> None:
    paths, more = ["small.png", "wide.png"], {"role": "user", "content": "<image>And here?"}
    pair = {"prompt": "<image>Count", "completion": [ANSWER, more, ANSWER], "images": paths}
    assert list_names(encode(root, pair)) == ["small", "wide"]
    alpaca = {"instruction": "<image>Count", "output": "Two.", "history": [["<image>Count", "One."]], "images": paths}
    assert list_names(encode(root, alpaca)) == ["small", "wide"]


def test_a_record_has_images_in_the_layout_that_is_read(root: Path) -> None:
    asked, one = [{"role": "user", "content": "Count<image>"}, ANSWER], {"images": ["small.png"]}
    expected = encode(root, {"messages": asked, **one})
    assert encode(root, {"conversations": asked, **one}, messages_field="conversations") == expected
    turned = {"instruction": "Count<image>", "response": "Two.", **one}
    assert encode(root, turned, prompt_field="instruction", completion_field="response") == expected
    assert encode(root, {"messages": asked, "prompt": "Count<image>", "input": "<image>", **one}) == expected
    assert encode(root, {"messages": asked, "images": "small.png"}) == expected


def test_an_image_comes_first_where_the_template_puts_it(root: Path) -> None:
    """As in the templates of Mistral, which sort a text and an image that are alone in a turn."""
    tokenizer = load_tokenizer(root, "mistral3")
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{% for p in m.content %}",
        "{% for p in (m.content | sort(attribute='type') if m.content | length == 2 else m.content) %}",
    )
    for parts in ([say("Count"), show("small")], [show("small"), say("Count")], [say("A"), show("small"), say("B")]):
        sample = ImageChatEncoder(image_folder=str(root)).encode(ask(*parts), "chat.jsonl:7", tokenizer)
        shown = tokenizer.apply_chat_template(ask(*parts)["messages"], tokenize=False)
        assert tokenizer.decode(sample["input_ids"]) == shown.replace("[IMG]", expand(root, "mistral3", "small"))


def test_records_without_images_are_those_of_chat(root: Path) -> None:
    record = {"messages": [{"role": "user", "content": "Count <image> of <img>"}, ANSWER]}
    chat = find_kind("chat").encoder().encode(record, "chat.jsonl:7", load_tokenizer(root))
    assert encode(root, record) == chat == encode(root, ask(say("Count <image> of <img>")))


def test_large_images_are_made_smaller(root: Path) -> None:
    whole, smaller = (encode(root, ask(show("wide"), say("?")), image_max_pixels=most) for most in (None, 1000))
    assert len(smaller["input_ids"]) < len(whole["input_ids"])


def save_png(path: Path, width: int, height: int) -> None:
    """Save a file that says that it is an image of this size, without its pixels."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [header, b"IDAT" + zlib.compress(b""), b"IEND"]
    lengths = [struct.pack(">I", len(chunk) - 4) for chunk in chunks]
    sums = [struct.pack(">I", zlib.crc32(chunk)) for chunk in chunks]
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(map(b"".join, zip(lengths, chunks, sums, strict=True))))


def save_bad_images(root: Path) -> None:
    (root / "empty.png").write_bytes(b"")
    (root / "text.png").write_text("no image")
    (root / "short.png").write_bytes((root / "wide.png").read_bytes()[:400])
    save_png(root / "huge.png", 20_000, 20_000)
    Image.new("RGB", (2000, 2)).save(root / "strip.png")
    stream = io.BytesIO()
    Image.new("F", (20, 20)).save(stream, "TIFF")
    (root / "float.png").write_bytes(stream.getvalue())


BAD = {
    "missing": r"image 1: image .*/missing.png cannot be read \(No such file or directory\); correct the path, give da",
    "empty": r"image 1: is no image; correct the file",
    "text": r"image 1: is no image; correct the file",
    "short": r"image 1: cannot be decoded \(.*\); correct the file",
    "huge": r"image 1: has 20000 x 20000 pixels, and data.image_refuse_pixels=100000000; make it smaller",
    "strip": r"image 1: the model's image processor refuses it \(absolute aspect ratio must be smaller than 200",
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_image_is_named(root: Path, name: str) -> None:
    save_bad_images(root)
    with pytest.raises(UserError, match=rf"^chat.jsonl:7: {BAD[name]}"):
        encode(root, ask(show(name), say("?")))


def test_an_image_of_an_unusual_mode_is_read(root: Path) -> None:
    save_bad_images(root)
    assert len(encode(root, ask(show("float"), say("?")))["attachments"]) == 1


def test_bad_records_are_named(root: Path) -> None:
    asked = {"role": "user", "content": "Count <image>"}
    both = {"images": ["small.png", "wide.png"]}
    for record, message in {
        "too many": ({"messages": [asked, ANSWER], **both}, "1 of its 2 images have no place in the text; write"),
        "too few": (
            {"messages": [{"role": "user", "content": "<image><image><image>"}, ANSWER], **both},
            "message 1: has a place for an image that the record does not have; add",
        ),
        "answer": (
            {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": [show("small")]}]},
            "message 2: an assistant turn has an image, and answers are text",
        ),
        "video": (ask({"type": "video", "video": "a.mp4"}), "message 1 has a part of type 'video', and data=image_ch"),
        "field": (ask(say("?")) | {"videos": ["a.mp4"]}, "the record has 'videos', and only text is trained on"),
        "address": (
            ask({"type": "image", "image": "https://somewhere/a.png"}),
            "message 1: its image is an address, https://somewhere/a.png; download it",
        ),
        "uri": (
            ask({"type": "image", "image": "data:image/png;base64,@@"}),
            "message 1: its image is a data URI that is not base64",
        ),
        "others": (
            {"messages": [asked, ANSWER], "image": "small.png"},
            "the record has images in 'image', and data.images_field=images; give data.images_field=image",
        ),
        "no list": ({"messages": [asked, ANSWER], "images": 3}, "image 1 must be a path or a data URI, not int"),
        "zero byte": (ask({"type": "image", "image": "a\0b"}), f"image 1: image {root}/a\0b cannot be read (embedded"),
        "user": (ask({"type": "image", "image": "~no.user/a"}), f"image 1: image {root}/~no.user/a cannot be read (No"),
        "number": (ask({"type": "image", "image": 3}), "message 1: its image must be a path or a data URI, not int"),
        "private": (
            {"messages": [{"role": "user", "content": "\U0010e003"}, ANSWER]},
            "message 1 has a private character",
        ),
    }.values():
        with pytest.raises(UserError, match=rf"^chat.jsonl:7: {re.escape(message)}"):
            encode(root, record)


def test_moved_images_are_the_same_data(root: Path, tmp_path: Path) -> None:
    tokenizer, record = load_tokenizer(root), ask(show("small"), say("?"))
    raw, found = [RawRecord("chat.jsonl:7", json.dumps(record))], []
    for name, content in (("as_it_was", "small"), ("moved", "small"), ("changed", "other")):
        (tmp_path / name).mkdir()
        image = Image.open(root / "small.png")
        (image if content == "small" else image.rotate(180)).save(tmp_path / name / "small.png")
        columns = encode_batch(
            raw, Encoding(ImageChatEncoder(image_folder=str(tmp_path / name)), tokenizer, 99)
        ).columns
        (tmp_path / name / "tokens").mkdir()
        with TokenizedWriter(tmp_path / name / "tokens", 1) as writer:
            writer.append(columns, 0)
            found.append(writer.fingerprints)
        (stored,) = TokenizedDataset(tmp_path / name / "tokens", True, True).attachments(0)
        assert json.loads(stored.content)["path"] == str(tmp_path / name / "small.png")
    as_it_was, moved, changed = found
    assert as_it_was == moved != changed


def test_an_image_that_is_gone_or_changed_is_named_while_a_run_trains(root: Path, tmp_path: Path) -> None:
    read, kept = ReadImages(ImageChatEncoder(), str(root / "internvl")), {"path": str(tmp_path / "a.png"), "hash": "0"}
    with pytest.raises(UserError, match=r"/a.png cannot be read, and could when it was tokenized; put it back, or"):
        read.open(kept)
    (tmp_path / "a.png").write_bytes(b"another")
    with pytest.raises(UserError, match=r"/a.png is another file than when it was tokenized; put the former one back"):
        read.open(kept)


def test_equal_texts_about_other_images_are_no_duplicates(root: Path, tmp_path: Path) -> None:
    Image.open(root / "small.png").rotate(180).save(root / "turned.png")
    encoding = Encoding(ImageChatEncoder(image_folder=str(root)), load_tokenizer(root), 99)
    raw = [RawRecord(f"f:{n}", json.dumps(ask(show(n), say("?")))) for n in ("small", "turned", "small")]
    with TokenizedWriter(tmp_path, 1) as writer:
        writer.append(encode_batch(raw, encoding).columns, 0)
    one, other, same = hash_samples(TokenizedDataset(tmp_path, True, True), 1).tolist()
    assert one == same != other


def test_the_end_of_an_answer_is_a_target_before_an_image(root: Path) -> None:
    """Also where the template shows an earlier answer without its end, so that the image follows at once."""
    tokenizer, record = load_tokenizer(root, "mistral3"), ask(say("A"))
    tokenizer.chat_template = (tokenizer.chat_template or "").replace("</s>", "").replace("Q: ", "").replace("A: ", "")
    for parts in ([say("and"), show("small")], [show("small"), say("and")], [show("small"), show("wide"), say("and")]):
        turns = [*record["messages"], {"role": "user", "content": parts}, ANSWER]
        sample = ImageChatEncoder(image_folder=str(root)).encode({"messages": turns}, "chat.jsonl:7", tokenizer)
        assert sample["labels"].count(tokenizer.eos_token_id) == 2, parts


def test_a_token_of_an_image_in_a_text_is_letters_or_refused(root: Path) -> None:
    tokenizer = load_tokenizer(root)
    pad = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    sample = encode(root, ask(say("What is <|image_pad|>?")))
    assert pad not in sample["input_ids"] and "<|image_pad|>" in tokenizer.decode(sample["input_ids"])
    answered = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "<|image_pad|>"}]}
    with pytest.raises(UserError, match=r"^chat.jsonl:7: has '<\|image_pad\|>' in a text, where no image belongs"):
        encode(root, answered)


def test_truncation_never_cuts_through_an_image(root: Path) -> None:
    tokenizer = load_tokenizer(root)
    more = [{"role": "user", "content": [show("wide"), say("And here?")]}, ANSWER]
    record = {"messages": [*ask(show("small"), say("How many?"))["messages"], *more]}
    first, second = encode(root, record)["attachments"]
    raw = [RawRecord("chat.jsonl:7", json.dumps(record))]
    encoder = ImageChatEncoder(image_folder=str(root))
    for most, kept in ((second.start + 1, 1), (second.stop - 1, 1), (second.stop, 2)):
        encoded = encode_batch(raw, Encoding(encoder, tokenizer, most, LengthPolicy.truncate))
        length = second.start if kept == 1 else most
        assert encoded.columns["length"].tolist() == [length]
        stored = json.loads(encoded.columns["attached"].tobytes())
        assert [each[:2] for each in stored] == [list(each[:2]) for each in (first, second)[:kept]]
    skipping = Encoding(encoder, tokenizer, first.stop - 1, LengthPolicy.truncate, OnBadRecord.skip)
    assert not encode_batch(raw, skipping).columns["length"].tolist()  # nothing of it is left


@pytest.mark.parametrize("model_type", ["internvl", "qwen3_vl"])
def test_a_model_of_images_answers_texts(root: Path, model_type: str) -> None:
    """Also where `transformers` has no class of its text model with a head (Qwen)."""
    ids = torch.tensor([load_tokenizer(root, model_type)("Count these").input_ids])
    options: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "do_sample": False}
    alone = load_model(open_weights(str(root / model_type))).float()
    assert alone.generate(ids, **options).tolist() == load_plain(root / model_type).generate(ids, **options).tolist()


def test_a_model_without_its_image_processor_is_named(root: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(root)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"has no preprocessor_config.json: data=image_chat reads the model's own"):
        ImageChatEncoder().encode(ask(say("?")), "chat.jsonl:7", AutoTokenizer.from_pretrained(tmp_path))
    (tmp_path / "preprocessor_config.json").write_text("{}")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UserError, match=r"data=image_chat trains internvl, mistral3, .*, not a 'llama'; give such"):
        ImageChatEncoder().encode(ask(say("?")), "chat.jsonl:7", AutoTokenizer.from_pretrained(tmp_path))


def test_a_library_that_is_missing_is_named(root: Path) -> None:
    with pytest.raises(UserError, match=r"image processor cannot be opened|data.image_backend=torchvision: "):
        encode(root, ask(show("small"), say("?")), image_backend=ImageBackend.torchvision)


def test_a_template_that_writes_no_image_is_named(root: Path) -> None:
    tokenizer = load_tokenizer(root)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}</s>{% endfor %}"
    with pytest.raises(UserError, match=r"^data.chat_template: it does not write '<\|image_pad\|>' for an image"):
        ImageChatEncoder(image_folder=str(root)).encode(ask(show("small"), say("?")), "chat.jsonl:7", tokenizer)
