"""Images, video and audio: text that accompanies them is not trained on without them."""

from __future__ import annotations

from typing import Any

import pytest

from data.encoders.chat import ChatEncoder
from data.encoders.sft import SFTEncoder
from errors import UserError
from extensions.preferences.encoders import PreferenceEncoder

ASKED = {"role": "user", "content": "What is this?"}
ANSWERED = {"role": "assistant", "content": "A cat."}
PARTS = [{"type": "image", "url": "cat.png"}, {"type": "text", "text": "What is this?"}]
PAIR = {"prompt": "What is this?", "completion": "A cat."}
PREFERENCE = {"prompt": "What is this?", "chosen": "A cat.", "rejected": "No."}


@pytest.mark.parametrize(
    ("encoder", "record"),
    [(ChatEncoder(), {"messages": [ASKED, ANSWERED]}), (SFTEncoder(), PAIR), (PreferenceEncoder(), PREFERENCE)],
)
@pytest.mark.parametrize("field", ["images", "image", "video", "audios"])
def test_a_field_next_to_the_text(chat_tokenizer, encoder: Any, record: dict, field: str) -> None:
    with pytest.raises(UserError, match=f"a.jsonl:3: the record has '{field}', and only text is trained on"):
        encoder.encode({**record, field: ["cat.png"]}, "a.jsonl:3", chat_tokenizer)
    assert encoder.encode({**record, field: None}, "a.jsonl:3", chat_tokenizer)
    assert encoder.encode({**record, field: []}, "a.jsonl:3", chat_tokenizer)


@pytest.mark.parametrize("kind", ["image", "image_url", "video", "audio"])
def test_a_part_of_a_message(chat_tokenizer, kind: str) -> None:
    asked = {"role": "user", "content": [{**PARTS[0], "type": kind}, PARTS[1]]}
    with pytest.raises(UserError, match=f"a.jsonl:3: message 1 has a part of type '{kind}', and only text"):
        ChatEncoder().encode({"messages": [asked, ANSWERED]}, "a.jsonl:3", chat_tokenizer)
