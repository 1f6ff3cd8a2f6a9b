"""Conversations through the templates of families, against a judge that knows what the model generates of them."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from support.chat_families import CONVERSATIONS, FAMILIES, Family, build_tokenizer, judge
from test_chat import read_targets_in_context

from data.counts import ContentCounts
from data.encoders.chat import ChatEncoder
from data.sample import Sample
from errors import UserError

PAGE = Path(__file__).parents[3] / "docs" / "data.md"


def encode(family: Family, tokenizer, record: dict, **keys: object) -> list[Sample]:
    encoder = ChatEncoder(stop_tokens=family.stops, **keys)
    made = encoder.encode(record, "chat.jsonl:1", tokenizer)
    return made if isinstance(made, list) else [made]


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", FAMILIES)
def test_each_turn_is_what_the_model_generates_in_the_context_of_inference(name: str, conversation: str) -> None:
    family, record, tokenizer = FAMILIES[name], CONVERSATIONS[conversation], build_tokenizer(name)
    try:
        expected = judge(family, record, tokenizer)
    except Exception as refusal:
        with pytest.raises(UserError, match="the chat template refuses the messages.*") as caught:
            encode(family, tokenizer, record)
        assert str(refusal) in str(caught.value)
        return
    samples = encode(family, tokenizer, record)
    found = [target for sample in samples for target in read_targets_in_context(sample, tokenizer)]
    assert found == expected


def describe(name: str, record: dict) -> str:
    family, tokenizer = FAMILIES[name], build_tokenizer(name)
    try:
        return str(len(encode(family, tokenizer, record)))
    except UserError:
        return "-"


def test_the_table_of_the_page_is_what_the_families_give() -> None:
    """Samples per conversation; `-` where the template has no form for it, and the record is refused."""
    lines = [f"| family | {' | '.join(CONVERSATIONS)} | a turn ends at |", f"|---{'|---' * len(CONVERSATIONS)}|---|"]
    for name, family in FAMILIES.items():
        tokenizer, stops = build_tokenizer(name), set()
        for record in CONVERSATIONS.values():
            counts = ContentCounts()
            with suppress(UserError):
                ChatEncoder(stop_tokens=family.stops).split(record, "chat.jsonl:1", tokenizer, counts)
            stops |= set(counts.stop_tokens)
        cells = [describe(name, record) for record in CONVERSATIONS.values()]
        ends = " ".join(f"`{stop}`" for stop in sorted(stops)).replace("|", "\\|")
        lines.append(f"| {name} | {' | '.join(cells)} | {ends} |")
    assert "\n".join(lines) + "\n" in PAGE.read_text(), "\n".join(lines)
