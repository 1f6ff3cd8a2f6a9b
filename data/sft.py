"""Supervised fine-tuning: which tokens of a record carry loss.

Prompt and completion:  [bos] prompt_template(prompt) | completion eos
Messages:               chat template up to an assistant turn | the turn up to its end token | ... | the last one

Prompts and targets take turns, a prompt first; a target always holds its end token. The pieces between bars are
tokenized separately, so a token never straddles a bar: that is where generation starts too. Targets are marked by their
place and never by their id, so a tokenizer whose pad token is its eos token trains the end token like any other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from data.sample import IGNORE_INDEX, Sample
from errors import UserError

PROMPT_SLOT = "{prompt}"
ASSISTANT = "assistant"

Piece = tuple[str, bool]  # text, is a target
Segment = tuple[list[int], bool]  # token ids, are targets


@dataclass(frozen=True)
class SFTEncoder:
    """Records with a prompt and a completion field, or with `messages`; one that has all is read as the former."""

    prompt_field: str = "prompt"
    completion_field: str = "completion"
    messages_field: str = "messages"
    prompt_template: str = "{prompt}\n"

    def __post_init__(self) -> None:
        if PROMPT_SLOT not in self.prompt_template:
            raise UserError(
                f"data.prompt_template={self.prompt_template!r} has no {PROMPT_SLOT}; write it where the prompt goes"
            )

    def encode(self, record: dict, location: str, tokenizer: PreTrainedTokenizerBase) -> Sample:
        """The sample of one record. Raises `UserError` naming `location` when a field is missing, empty or not text."""
        if tokenizer.eos_token_id is None:
            raise UserError("the tokenizer has no eos token, so no end of a completion can be trained; add one to it")
        fields = (self.prompt_field, self.completion_field)
        if self.messages_field in record and not all(field in record for field in fields):
            segments = _encode_messages(record[self.messages_field], location, tokenizer)
        else:
            segments = self._encode_completion(record, location, tokenizer)
        return _join(segments)

    def _encode_completion(self, record: dict, location: str, tokenizer: PreTrainedTokenizerBase) -> list[Segment]:
        self._check_fields(record, location)
        prompt = _check_text(record[self.prompt_field], f"{location}: field '{self.prompt_field}'")
        completion = _check_text(record[self.completion_field], f"{location}: field '{self.completion_field}'")
        if not completion.strip():
            raise UserError(f"{location}: field '{self.completion_field}' is empty; fill it or remove the record")
        # Not str.format: prompts and templates may hold braces of their own.
        text = self.prompt_template.replace(PROMPT_SLOT, prompt)
        prompt_ids, completion_ids = _tokenize([text, completion], tokenizer)
        return [
            (_leading_bos(tokenizer) + prompt_ids, False),
            (completion_ids + [tokenizer.eos_token_id], True),
        ]

    def _check_fields(self, record: dict, location: str) -> None:
        named = {"data.prompt_field": self.prompt_field, "data.completion_field": self.completion_field}
        missing = {key: field for key, field in named.items() if field not in record}
        if missing:
            present = ", ".join(f"'{field}'" for field in record) or "no fields"
            raise UserError(
                f"{location}: no field '{next(iter(missing.values()))}'; the record has {present};"
                f" set {' and '.join(missing)}"
            )


def _encode_messages(messages: object, location: str, tokenizer: PreTrainedTokenizerBase) -> list[Segment]:
    if tokenizer.chat_template is None:
        raise UserError(
            f"{location}: the record holds messages, but the tokenizer has no chat template; use the tokenizer of a"
            " chat model, or records with a prompt and a completion"
        )
    turns = _check_messages(messages, location)
    pieces = _split_conversation(turns, location, tokenizer)
    token_ids = _tokenize([text for text, _ in pieces], tokenizer)
    segments = [(ids, is_target) for ids, (_, is_target) in zip(token_ids, pieces)]
    if not _ends_with_eos(pieces, tokenizer):
        segments.append(([tokenizer.eos_token_id], True))
    return segments


def _check_messages(messages: object, location: str) -> list[dict]:
    if not isinstance(messages, list) or not messages:
        raise UserError(
            f"{location}: messages must be a list of objects with a role and a content; mend or remove the record"
        )
    for number, message in enumerate(messages, start=1):
        where = f"{location}: message {number}"
        if not isinstance(message, dict) or "role" not in message or "content" not in message:
            raise UserError(f"{where} must be an object with a role and a content; mend or remove the record")
        _check_text(message["role"], f"{where}: role")
        content = _check_text(message["content"], f"{where}: content")
        if message["role"] == ASSISTANT and not content.strip():
            raise UserError(f"{where} is an empty assistant turn; fill it or remove the record")
    if messages[0]["role"] == ASSISTANT:
        raise UserError(f"{location}: message 1 is an assistant turn; put the turn that it answers before it")
    if not any(message["role"] == ASSISTANT for message in messages):
        raise UserError(f"{location}: no assistant turn among the messages, so no target; remove the record")
    return messages


def _split_conversation(turns: list[dict], location: str, tokenizer: PreTrainedTokenizerBase) -> list[Piece]:
    """Cut the rendered conversation before each assistant turn and after its end token.

    Turns after the last assistant turn are dropped: nothing is trained on them. What a template writes after the end
    token (a newline, as a rule) is masked: the model stops at the token and never generates it.
    """
    pieces: list[Piece] = []
    done = ""
    for index, turn in enumerate(turns):
        if turn["role"] != ASSISTANT:
            continue
        before = _render(turns[:index], location, tokenizer, add_generation_prompt=True)
        after = _render(turns[: index + 1], location, tokenizer, add_generation_prompt=False)
        if not (before.startswith(done) and after.startswith(before)):
            raise UserError(
                f"{location}: message {index + 1}: the chat template rewrites earlier turns, so the text of the"
                " assistant turn cannot be told from its prompt; use another template, or one record a turn"
            )
        target = _cut_after_eos(after[len(before) :], tokenizer)
        pieces += [(before[len(done) :], False), (target, True)]
        done = before + target
    return pieces


def _cut_after_eos(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    head, eos, tail = text.rpartition(tokenizer.eos_token)
    return head + eos if eos and not tail.strip() else text


def _ends_with_eos(pieces: Sequence[Piece], tokenizer: PreTrainedTokenizerBase) -> bool:
    # Only the last turn gets an eos token that the template does not write: inside a conversation it would change the
    # history into one that the template never shows the model when it generates.
    return pieces[-1][0].endswith(tokenizer.eos_token)


def _render(
    turns: list[dict], location: str, tokenizer: PreTrainedTokenizerBase, *, add_generation_prompt: bool
) -> str:
    try:
        return tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=add_generation_prompt)
    except (TemplateError, ValueError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"{location}: the chat template refuses the messages: {reason}; mend or remove the record"
        ) from None


def _check_text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise UserError(f"{where} must be text, not {type(value).__name__}; mend or remove the record")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise UserError(f"{where} holds half of a surrogate pair, no character; mend or remove the record") from None
    return value


def _tokenize(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    # verbose=False: a text longer than the model's maximum is cut and counted here, no need for the tokenizer to warn.
    return tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]


@lru_cache(maxsize=1)
def _bos_of(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    # Not of an empty text: where bos and eos are one token, a tokenizer that only appends eos would seem to put bos.
    first = tokenizer("a")["input_ids"][0]
    return (first,) if first == tokenizer.bos_token_id else ()


def _leading_bos(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    return list(_bos_of(tokenizer))


def _join(segments: Sequence[Segment]) -> Sample:
    input_ids = [token for ids, _ in segments for token in ids]
    labels = [token if is_target else IGNORE_INDEX for ids, is_target in segments for token in ids]
    return Sample(input_ids=input_ids, labels=labels)
