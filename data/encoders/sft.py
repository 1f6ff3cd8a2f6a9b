"""Prompt and completion: `[bos] prompt_template(prompt) | completion eos`, loss after the bar, end token included."""

from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from data.counts import ContentCounts
from data.encoders.chat import TurnKeys, join_pair, split_messages
from data.encoders.control_tokens import Guard
from data.encoders.messages import refuse_media
from data.encoders.segments import Piece, PieceEncoder, Pieces, check_text, get_eos, get_fields, leading_bos
from errors import UserError

PROMPT_SLOT = "{prompt}"


@dataclass(frozen=True)
class SFTEncoder(TurnKeys, PieceEncoder):
    """Records with a prompt and a completion field, texts or lists of messages, or with `messages`; one with both is
    read as the former. With `response_marker` also records with a text, in which the response comes after it."""

    prompt_field: str = "prompt"
    completion_field: str = "completion"
    messages_field: str = "messages"
    prompt_template: str = "{prompt}\n"
    text_field: str | None = "text"
    response_marker: str | None = None
    chat_template: str | None = field(default=None, repr=False)  # as named; the tokenizer has its text

    def __post_init__(self) -> None:
        check_template(self.prompt_template)
        if self.response_marker == "":
            raise UserError("data.response_marker is empty; give the text after which a response begins, or null")

    def split(
        self, record: dict, location: str, tokenizer: PreTrainedTokenizerBase, counts: ContentCounts
    ) -> list[Pieces]:
        """Return the pieces of each sample. Raises `UserError` naming `location` for a missing, empty or non-text
        field."""
        get_eos(tokenizer)  # raises without one
        refuse_media(record, location)
        fields = (self.prompt_field, self.completion_field)
        if self.messages_field in record and not all(name in record for name in fields):
            return split_messages(record[self.messages_field], record, location, tokenizer, self, counts)
        guard = Guard(tokenizer, self.control_tokens, counts)
        if self.response_marker and self.text_field in record and not all(name in record for name in fields):
            text = check_text(record[self.text_field], where := f"{location}: field '{self.text_field}'")
            pieces = split_text(text, self.response_marker, where, guard, tokenizer)
            counts.num_target_turns += 1
            return [guard.release(pieces)]
        named = {"data.prompt_field": self.prompt_field, "data.completion_field": self.completion_field}
        prompt, completion = get_fields(record, named, location)
        if isinstance(prompt, list) or isinstance(completion, list):
            messages, first_target = join_pair(prompt, completion, names=fields, location=location)
            return split_messages(messages, record, location, tokenizer, self, counts, first_target)
        refuse_texts(self.chat_template, location, "data=chat")
        texts = [check_text(value, f"{location}: field '{name}'") for name, value in zip(fields, (prompt, completion))]
        if not texts[1].strip():
            raise UserError(f"{location}: field '{self.completion_field}' is empty; fill it or remove the record")
        question, answer = (
            guard.protect_text(text, f"{location}: field '{name}'") for name, text in zip(fields, texts)
        )
        counts.note_prompt(texts[0], location)
        counts.num_target_turns += 1
        counts.num_text_turns += 1
        return [guard.release(split_completion(self.prompt_template, question, answer, tokenizer))]


def check_template(template: str) -> None:
    """Raise `UserError` for a prompt template without a slot for the prompt."""
    if PROMPT_SLOT not in template:
        raise UserError(f"data.prompt_template={template!r} has no {PROMPT_SLOT}; write it where the prompt goes")


def refuse_texts(chat_template: str | None, location: str, instead: str) -> None:
    """Raise `UserError` where a chat template was given, which texts cannot use. instead: the data that can."""
    if chat_template is not None:
        raise UserError(
            f"{location}: data.chat_template={chat_template} is not applied to a prompt and an answer that are texts; "
            f"give {instead}, or data.chat_template=null and the form in data.prompt_template"
        )


def split_completion(template: str, prompt: str, completion: str, tokenizer: PreTrainedTokenizerBase) -> Pieces:
    """Return the pieces of a prompt, laid into its template, and its completion, which is the target."""
    text = template.replace(PROMPT_SLOT, prompt)  # not str.format: prompts and templates may hold braces of their own
    return [
        Piece(leading_bos(tokenizer), False),
        Piece(text, False),
        Piece(completion, True),
        Piece([get_eos(tokenizer)], True),
    ]


def split_text(text: str, marker: str, where: str, guard: Guard, tokenizer: PreTrainedTokenizerBase) -> Pieces:
    """Return the pieces of a text whose target is what comes after the last marker, and the eos token, whether the
    text ends with it or not. Raises `UserError` naming `where` for a text without a marker or a response."""
    prompt, found, response = text.rpartition(marker)
    response = response.rstrip().removesuffix(str(tokenizer.eos_token))
    if not found or not response.strip():
        raise UserError(
            f"{where} has nothing after data.response_marker={marker!r}, or lacks it; fix or remove the record"
        )
    bos = leading_bos(tokenizer)
    if bos:
        prompt = prompt.removeprefix(str(tokenizer.bos_token))
    return [
        Piece(bos, False),
        Piece(guard.protect_text(prompt, where) + marker, False),
        Piece(guard.protect_text(response, where), True),
        Piece([get_eos(tokenizer)], True),
    ]
