"""The tokens at which generation stops: the tokenizer's eos token, those of generation_config.json, and what a template
writes at the end of a turn or, where it writes nothing there, at the beginning of the next one."""

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Stops:
    """eos: the tokenizer's. known: all at which a model is known to stop. special: every special token but the one that
    begins a text, the longest first."""

    eos: str
    known: frozenset[str]
    special: tuple[str, ...]

    def split(self, generated: str, find_following: Callable[[], str]) -> tuple[str, str]:
        """Return the text of a turn and the token that ends it. generated: what the template shows of the turn.
        find_following: returns what it writes between this turn and the text of the next one."""
        ends = self._list_ends(generated)
        for place, token in ends:
            if token in self.known:
                return generated[:place], token
        following = find_following()
        opening = following.lstrip()
        token = next((token for token in self.special if opening.startswith(token)), "")
        gap = following[: len(following) - len(opening)]
        if ends and token not in self.known:
            place, last = ends[-1]
            return generated[:place], last
        return (generated.rstrip() + gap, token) if token else (generated.rstrip(), self.eos)

    def find(self, text: str, stop: str, start: int, bound: int) -> tuple[int, str]:
        """Return where a turn ends in the text of a conversation, and the token that ends it there: `stop`, or the
        first special token. start: a place in the turn. bound: where the next one begins."""
        if stop and (place := text.find(stop, start, bound)) >= 0:
            return place, stop
        places = [(place, token) for token in self.special if (place := text.find(token, start, bound)) >= 0]
        return min(places, default=(start, stop or self.eos))

    def _list_ends(self, text: str) -> list[tuple[int, str]]:
        """Return the special tokens that a text ends with, white space between them aside, each with its place."""
        ends: list[tuple[int, str]] = []
        end = len(text.rstrip())
        while text.endswith(self.special, 0, end):
            token = next(token for token in self.special if text.endswith(token, 0, end))
            ends.insert(0, (end - len(token), token))
            end = len(text[: end - len(token)].rstrip())
        return ends


def list_special(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the texts of the tokenizer's special tokens, the longest first; not one without text, which a damaged
    tokenizer may have: every text ends with it."""
    added = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    texts = added.union(map(str, tokenizer.all_special_tokens)) - {""}
    return sorted(texts, key=lambda token: (-len(token), token))


def build_stops(tokenizer: PreTrainedTokenizerBase, stop_tokens: Collection[str]) -> Stops:
    """Return the stop tokens of a tokenizer with an eos token. stop_tokens: those of its generation_config.json."""
    eos = str(tokenizer.eos_token)
    special = tuple(token for token in list_special(tokenizer) if token != tokenizer.bos_token or token == eos)
    return Stops(eos, frozenset({eos, *stop_tokens}), special)


def read_stop_tokens(folder: str | Path, tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Return the tokens at which generation_config.json in a model's folder stops; none where there is no such file."""
    file = Path(folder) / "generation_config.json"
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return ()
    ends = fields.get("eos_token_id") if isinstance(fields, dict) else None
    ids = ends if isinstance(ends, list) else [ends]
    known = [index for index in ids if isinstance(index, int) and 0 <= index < len(tokenizer)]
    tokens = tokenizer.convert_ids_to_tokens(known)
    return tuple(sorted(token for token in tokens if token))
