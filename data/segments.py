"""Text in pieces, tokenized so that no token straddles the place where loss begins or ends.

Pieces are tokenized separately: that is where generation starts too. Targets are marked by their place and never by their
id, so a tokenizer whose pad token is its eos token trains the end token like any other.
"""

from collections.abc import Sequence
from functools import lru_cache

from transformers import PreTrainedTokenizerBase

from data.sample import IGNORE_INDEX, Sample
from errors import UserError

Piece = tuple[str, bool]  # text, is a target
Segment = tuple[list[int], bool]  # token ids, are targets


def check_eos(tokenizer: PreTrainedTokenizerBase) -> None:
    if tokenizer.eos_token_id is None:
        raise UserError("the tokenizer has no eos token, so no end of a completion can be trained; add one to it")


def check_text(value: object, where: str) -> str:
    """`value`, if it is text. Raises `UserError` naming `where` if it is not."""
    if not isinstance(value, str):
        raise UserError(f"{where} must be text, not {type(value).__name__}; mend or remove the record")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise UserError(f"{where} holds half of a surrogate pair, no character; mend or remove the record") from None
    return value


def get_fields(record: dict, named: dict[str, str], location: str) -> list[object]:
    """The values of the fields that config keys name (key -> field). Raises `UserError` with what the record has instead."""
    missing = {key: field for key, field in named.items() if field not in record}
    if missing:
        present = ", ".join(f"'{field}'" for field in record) or "no fields"
        raise UserError(
            f"{location}: no field '{next(iter(missing.values()))}'; the record has {present};"
            f" set {' and '.join(missing)}"
        )
    return [record[field] for field in named.values()]


def tokenize_pieces(pieces: Sequence[Piece], tokenizer: PreTrainedTokenizerBase) -> list[Segment]:
    # verbose=False: a text longer than the model's maximum is cut and counted here, no need for the tokenizer to warn.
    texts = [text for text, _ in pieces]
    token_ids = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
    return [(ids, is_target) for ids, (_, is_target) in zip(token_ids, pieces)]


def join_segments(segments: Sequence[Segment]) -> Sample:
    input_ids = [token for ids, _ in segments for token in ids]
    labels = [token if is_target else IGNORE_INDEX for ids, is_target in segments for token in ids]
    return Sample(input_ids=input_ids, labels=labels)


@lru_cache(maxsize=1)
def _bos_of(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    # Not of an empty text: where bos and eos are one token, a tokenizer that only appends eos would seem to put bos.
    first = tokenizer("a")["input_ids"][0]
    return (first,) if first == tokenizer.bos_token_id else ()


def leading_bos(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The bos token where the tokenizer puts one itself."""
    return list(_bos_of(tokenizer))
