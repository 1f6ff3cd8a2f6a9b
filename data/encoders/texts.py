"""One text, or several that are read together, with the tokens that the tokenizer itself puts around them."""

from collections.abc import Sequence
from functools import lru_cache

from transformers import PreTrainedTokenizerBase

from data.encoders.control_tokens import Guard
from data.encoders.segments import Piece, Pieces, find_word, tokenize_parts
from data.sample import Sample


def tokenize_texts(texts: Sequence[str], location: str, guard: Guard) -> Sample:
    """Return the sample of one text, or of several that are read together, of which the last is its own text. Raises
    `UserError` for a text that becomes no token."""
    pieces = _join_texts(texts, guard.tokenizer)
    before, own = tokenize_parts([guard.release(pieces[:-2]), guard.release(pieces[-2:])], location, guard.tokenizer)
    return Sample(
        input_ids=before["input_ids"] + own["input_ids"],
        labels=before["labels"] + own["labels"],
        num_first=len(before["input_ids"]),
        num_last=len(find_special(guard.tokenizer, len(texts))[-1]),
    )


def _join_texts(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> Pieces:
    """Return the pieces of texts, with what the tokenizer itself puts before, between and after them."""
    first, *between = find_special(tokenizer, len(texts))
    pieces = [Piece(list(first), False)]
    for text, special in zip(texts, between, strict=True):
        pieces += [Piece(text, False), Piece(list(special), False)]
    return pieces


@lru_cache(maxsize=4)
def find_special(tokenizer: PreTrainedTokenizerBase, num_texts: int) -> tuple[tuple[int, ...], ...]:
    """Return the ids that the tokenizer itself puts before, between and after that many texts."""
    word = find_word(tokenizer)
    plain = tokenizer(word, add_special_tokens=False)["input_ids"]
    rest, special = tokenizer(*[word] * num_texts)["input_ids"], []
    for _ in range(num_texts):
        start = next(i for i in range(len(rest)) if rest[i : i + len(plain)] == plain)
        special.append(tuple(rest[:start]))
        rest = rest[start + len(plain) :]
    return (*special, tuple(rest))
