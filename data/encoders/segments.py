"""Text in pieces, tokenized so that no token straddles the place where loss begins or ends.

Pieces are tokenized separately, since generation starts at the same boundary. Targets are marked by position, never
by token id, so a tokenizer whose pad token is its eos token trains the end token like any other.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from typing import ClassVar, NamedTuple

from transformers import PreTrainedTokenizerBase

from data.counts import ContentCounts
from data.sample import IGNORE_INDEX, Attachment, Group, Sample
from errors import UserError


class Piece(NamedTuple):
    """A part of a sample. content: text or token ids. first_label: of the first token, where the model generates
    another one in its place: a template may show a turn of the history without the token that ended it. is_answer: the
    model generates it, even if it is no target, such as reasoning that is not trained on. attachment: what travels with
    its tokens, see `Attachment`; empty for nothing."""

    content: str | list[int]
    is_target: bool
    first_label: int | None = None
    is_answer: bool = False
    attachment: str = ""


Pieces = list[Piece]


class PieceEncoder(ABC):
    """An encoder that splits records into pieces, so that many records can be tokenized in one call. attaches: whether
    pieces may have attachments; then it has a method `describe_attachments(tokenizer)`, which returns a text of what
    these depend on besides the fields, such as the files of an image processor, and `identify(content)`, which returns
    a text of what an attachment is, wherever it lies."""

    attaches: ClassVar[bool] = False

    @abstractmethod
    def split(
        self, record: dict, location: str, tokenizer: PreTrainedTokenizerBase, counts: ContentCounts
    ) -> list[Pieces] | tuple[Pieces, Pieces]:
        """Return the pieces of each sample that one record becomes; a pair of them for preferences. counts: what was
        found is added to it. Raises `UserError` naming `location` for a record that cannot be read.
        """

    def encode(self, record: dict, location: str, tokenizer: PreTrainedTokenizerBase) -> Sample | Group | list[Sample]:
        pieces = self.split(record, location, tokenizer, ContentCounts())
        unknown: dict[int, str] = {}
        samples = tokenize_pieces(pieces, tokenizer, unknown)
        for text in unknown.values():
            raise no_token_error(text, location)
        if isinstance(pieces, tuple):
            return samples[0], samples[1]
        return samples if len(samples) > 1 else samples[0]


class CountingEncoder(ABC):
    """An encoder that makes the sample of a record itself, since it has a label in addition to tokens; or the samples
    that stay together."""

    @abstractmethod
    def encode(
        self,
        record: dict,
        location: str,
        tokenizer: PreTrainedTokenizerBase,
        counts: ContentCounts | None = None,
    ) -> Sample | Group:
        """Return the sample of one record, or a tuple of those that stay together. counts: what was found is added to
        it. Raises `UserError` naming `location` for a record that cannot be read.
        """


@lru_cache(maxsize=1)  # asking a tokenizer for a token takes as long as tokenizing a word
def get_eos(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the id of the eos token. Raises `UserError` when there is none."""
    if tokenizer.eos_token_id is None:
        raise UserError("the tokenizer has no eos token, so no end of a completion can be trained; add one to it")
    return tokenizer.eos_token_id


def check_text(value: object, where: str) -> str:
    """Return `value` if it is text. Raises `UserError` naming `where` if it is not."""
    if not isinstance(value, str):
        raise UserError(f"{where} must be text, not {type(value).__name__}; fix or remove the record")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise UserError(
            f"{where} holds half of a surrogate pair, which is not a character; fix or remove the record"
        ) from None
    return value


def check_filled(value: object, where: str) -> str:
    """Return `value` if it is a text with letters. Raises `UserError` naming `where` if it is not."""
    text = check_text(value, where)
    if not text.strip():
        raise UserError(f"{where} is empty; fill it or remove the record")
    return text


def get_fields(record: dict, named: dict[str, str], location: str) -> list[object]:
    """Return the values of the fields that config keys name (key -> field). Raises `UserError` that lists the record's
    fields where one is missing.
    """
    missing = {key: field for key, field in named.items() if field not in record}
    if missing:
        present = ", ".join(f"'{field}'" for field in record) or "no fields"
        raise UserError(
            f"{location}: no field '{next(iter(missing.values()))}'; the record has {present}; "
            f"set {' and '.join(missing)}"
        )
    return [record[field] for field in named.values()]


def tokenize_pieces(
    records: Sequence[Sequence[Piece]], tokenizer: PreTrainedTokenizerBase, unknown: dict[int, str]
) -> list[Sample]:
    """Return the samples of several records, tokenized in one call: the tokenizer works on many texts in threads.

    unknown: filled with the first text of each record (by its index) that becomes no token because the vocabulary lacks
    its letters: it would be lost.
    """
    texts = [piece.content for pieces in records for piece in pieces if isinstance(piece.content, str)]
    tokenized = iter(tokenize_plain(texts, tokenizer))
    samples = []
    for number, pieces in enumerate(records):
        segments = []
        for piece in pieces:
            content = piece.content
            token_ids = next(tokenized) if isinstance(content, str) else content
            if not token_ids and isinstance(content, str) and content.strip():
                unknown.setdefault(number, content)
            segments.append(piece._replace(content=token_ids))
        samples.append(_join(segments))
    return samples


def tokenize_plain(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Return the ids of each text without special tokens; none of a text with a word that the tokenizer does not know
    and has no token for, at which models of whole words raise."""
    # verbose=False: a text longer than the model's maximum is cut and counted later; the tokenizer need not warn.
    options = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
    try:
        return tokenizer(list(texts), **options)["input_ids"] if texts else []
    except Exception:  # tokenizers raises nothing more special (0.23: "WordLevel error: Missing [UNK] token")
        if len(texts) == 1:
            return [[]]
        return [tokenize_plain([text], tokenizer)[0] for text in texts]


def tokenize_sample(pieces: Pieces, location: str, tokenizer: PreTrainedTokenizerBase) -> Sample:
    """Return the sample of one record's pieces. Raises `UserError` for a text that becomes no token."""
    return tokenize_parts([pieces], location, tokenizer)[0]


def tokenize_parts(parts: Sequence[Pieces], location: str, tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
    """Return the sample of each part of one record. Raises `UserError` for a text that becomes no token."""
    unknown: dict[int, str] = {}
    samples = tokenize_pieces(parts, tokenizer, unknown)
    for text in unknown.values():
        raise no_token_error(text, location)
    return samples


def no_token_error(text: str, location: str) -> UserError:
    """Return the error for a text that becomes no token."""
    return UserError(
        f"{location}: the tokenizer makes no token of {text.strip()[:40]!r}, because its vocabulary lacks the letters"
        " and it has no token for what is unknown; give another with tokenizer_name_or_path, or remove the record"
    )


def _join(segments: Sequence[Piece]) -> Sample:
    input_ids: list[int] = []
    labels: list[int] = []
    first_label = num_prompt = None
    attachments: list[Attachment] = []
    for token_ids, is_target, replaced, is_answer, attachment in segments:
        assert isinstance(token_ids, list)
        if attachment:
            attachments.append(Attachment(len(input_ids), len(input_ids) + len(token_ids), attachment))
        if num_prompt is None and (is_answer or is_target):
            num_prompt = len(input_ids)
        first_label = replaced if replaced is not None else first_label  # kept for the next piece where this is empty
        input_ids += token_ids
        added = list(token_ids) if is_target else [IGNORE_INDEX] * len(token_ids)
        if added and first_label is not None:
            added[0], first_label = first_label, None
        labels += added
    sample = Sample(input_ids=input_ids, labels=labels, num_prompt=len(input_ids) if num_prompt is None else num_prompt)
    return {**sample, "attachments": attachments} if attachments else sample


@lru_cache(maxsize=4)
def find_word(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a text that becomes a token or more: `a`, or where the vocabulary lacks it a word that it holds. Raises
    `UserError` where no text does."""
    words = (token for token in sorted(tokenizer.get_vocab()) if token not in tokenizer.all_special_tokens)
    for text in ("a", *words):
        if tokenize_plain([text], tokenizer)[0]:
            return text
    raise UserError("the tokenizer makes no token of any text of its own vocabulary; give another one")


@lru_cache(maxsize=1)
def _find_bos(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    # Not an empty text: where bos and eos are one token, a tokenizer that only appends eos would seem to prepend bos.
    first = tuple(tokenizer(find_word(tokenizer))["input_ids"][:1])
    return first if first == (tokenizer.bos_token_id,) else ()


def leading_bos(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return [the bos token] where the tokenizer prepends one itself, else []."""
    return list(_find_bos(tokenizer))
