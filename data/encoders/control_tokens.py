"""Texts of control tokens in the content of records: a user who writes `<|im_end|>` must not end a turn.

Texts are guarded before a chat template lays them out: each such text becomes one private character, which no template
and no tokenizer knows. When the pieces of a sample are cut, it becomes the tokens of its letters.
"""

import re
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from data.counts import MAX_PLACES, ContentCounts
from data.encoders.messages import ASSISTANT, Turn
from data.encoders.segments import Piece, Pieces
from data.encoders.stops import list_special
from data.options import ControlTokens
from errors import UserError

FIRST = 0x100000  # of the private characters that stand for guarded texts
PRIVATE = re.compile("[\U00100000-\U0010fffd]")


@dataclass
class Guard:
    """Guards the texts of one record. policy: None is `text` for what the model reads of a conversation and `parse` for
    everything else. counts: what is found is added to it."""

    tokenizer: PreTrainedTokenizerBase
    policy: ControlTokens | None
    counts: ContentCounts
    guarded: dict[str, str] = field(default_factory=dict)  # character -> text

    def protect_turn(self, turn: Turn, where: str) -> Turn:
        """Return a message with guarded texts. Raises `UserError` naming `where` if control tokens are refused, or
        cannot be read as letters."""
        policy = self.policy or (ControlTokens.parse if turn["role"] == ASSISTANT else ControlTokens.text)
        return {name: value if name == "role" else self._protect(value, where, policy) for name, value in turn.items()}

    def protect_text(self, text: str, where: str) -> str:
        """Return a guarded text that is no message. Raises `UserError` as `protect_turn` does."""
        return self._protect(text, where, self.policy or ControlTokens.parse)

    def protect_input(self, value: Any, where: str) -> Any:
        """Return what else the model reads, such as tools, with its texts and names guarded as those of a user's turn.
        Raises `UserError` as `protect_turn` does."""
        return self._protect(value, where, self.policy or ControlTokens.text)

    def _protect(self, value: Any, where: str, policy: ControlTokens) -> Any:
        if isinstance(value, dict):
            return {
                self._protect(name, where, policy): self._protect(part, where, policy) for name, part in value.items()
            }
        if isinstance(value, list):
            return [self._protect(part, where, policy) for part in value]
        if not isinstance(value, str):
            return value
        found = find_pattern(self.tokenizer).findall(value)
        if found:
            self._count(found, where)
            if policy is ControlTokens.refuse:
                raise UserError(
                    f"{where} holds the control token '{found[0]}' as text; remove it or the record, or give "
                    "data.control_tokens=text to read it as its letters"
                )
            lost = next((text for text in found if not encode_letters(self.tokenizer, text)), None)
            if policy is ControlTokens.text and lost:
                raise UserError(
                    f"{where} holds the control token '{lost}' as text, and the tokenizer has no tokens for its "
                    "letters; remove it or the record, or give data.control_tokens=parse to read it as the token"
                )
        value = PRIVATE.sub(self._stand_in, value)  # those of the text itself
        return find_pattern(self.tokenizer).sub(self._stand_in, value) if policy is ControlTokens.text else value

    def _count(self, found: list[str], where: str) -> None:
        self.counts.num_control_tokens += len(found)
        if len(self.counts.control_places) < MAX_PLACES:
            self.counts.control_places.append(f"{where} ({found[0]})")

    def _stand_in(self, text: re.Match[str]) -> str:
        known = next((character for character, other in self.guarded.items() if other == text[0]), None)
        character = known or chr(FIRST + len(self.guarded))
        self.guarded[character] = text[0]
        return character

    def release(self, pieces: Pieces) -> Pieces:
        """Return the pieces with the tokens of guarded texts in place of their characters."""
        return [part for piece in pieces for part in self._release(piece)] if self.guarded else pieces

    def _release(self, piece: Piece) -> Pieces:
        if not isinstance(piece.content, str):
            return [piece]
        parts: Pieces = []
        for text in re.split(f"({PRIVATE.pattern})", piece.content):
            known = self.guarded.get(text, text)
            is_control = text in self.guarded and not PRIVATE.fullmatch(known)
            content = encode_letters(self.tokenizer, known) if is_control else known
            if content:
                parts.append(piece._replace(content=content, first_label=None))
        return [parts[0]._replace(first_label=piece.first_label), *parts[1:]] if parts else [piece]


@lru_cache(maxsize=2)
def find_pattern(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    """Return a pattern of the texts of the tokenizer's special tokens."""
    return re.compile("|".join(map(re.escape, list_special(tokenizer))) or "(?!)")  # which matches nothing


@lru_cache(maxsize=1024)
def encode_letters(tokenizer: PreTrainedTokenizerBase, token: str) -> list[int]:
    """Return the ids of a special token's text, none of them its own; empty where there are none."""
    own = tokenizer.convert_tokens_to_ids(token)
    for parts in ([token], [token[:1], token[1:]], list(token)):
        options = {"add_special_tokens": False, "split_special_tokens": True}
        ids = [each for part in parts for each in tokenizer(part, **options)["input_ids"]]
        if own not in ids:
            return ids
    return []
