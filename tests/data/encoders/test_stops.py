"""Special tokens at which generation stops."""

from __future__ import annotations

from pathlib import Path

from support.tiny import save_tokenizer
from tokenizers import AddedToken

from data.encoders.stops import build_stops


def test_a_special_token_without_text_ends_no_turn(tmp_path: Path) -> None:
    """As a damaged tokenizer may have one: every text ends with it."""
    tokenizer = save_tokenizer(tmp_path)
    tokenizer.pad_token = AddedToken("", special=True)
    assert "" in tokenizer.all_special_tokens
    stops = build_stops(tokenizer, ())
    assert "" not in stops.special
    assert stops.split("an answer</s>\n", lambda: "") == ("an answer", "</s>")
