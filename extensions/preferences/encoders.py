"""Preferences: one prompt and two answers, of which the first was preferred; each answer is a sample, and the two stay
together. And single answers, each labelled desirable or not.

Text:      `[bos] prompt_template(prompt) | chosen eos` and `[bos] prompt_template(prompt) | rejected eos`, targets
           after the bar.
Messages:  the conversation up to the answers in the tokenizer's chat template; only assistant turns of the answers are
           targets.

Prompt and answers may each be a text or a list of messages; next to a list, a text becomes a user message (prompt) or
an assistant message (answer). Answers that are whole conversations need no prompt: it is the turns that both have in
common.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

from transformers import PreTrainedTokenizerBase

from data.counts import ContentCounts
from data.encoders.chat import MessageKeys, split_messages
from data.encoders.control_tokens import Guard
from data.encoders.kind import DataKind
from data.encoders.messages import ASSISTANT, as_messages, refuse_media
from data.encoders.segments import (
    CountingEncoder,
    PieceEncoder,
    Pieces,
    check_text,
    get_eos,
    get_fields,
    tokenize_sample,
)
from data.encoders.sft import check_template, refuse_texts, split_completion
from data.sample import Sample
from errors import UserError

LABELS = {"true": True, "false": False}  # the cells of a table are texts
MESSAGES = "the prompt or the answer as a list of messages"


@dataclass(frozen=True, kw_only=True)
class AnswerKeys(MessageKeys):
    """The keys of kinds of data whose records hold a prompt and answers, each one sample."""

    prompt_template: str = "{prompt}\n"
    chat_template: str | None = field(default=None, repr=False)  # as named; the tokenizer has its text

    def __post_init__(self) -> None:
        check_template(self.prompt_template)


@dataclass(frozen=True)
class PreferenceEncoder(AnswerKeys, PieceEncoder):
    """Records with a prompt, a chosen and a rejected answer. A field `tools` goes to the chat template."""

    prompt_field: str = "prompt"
    chosen_field: str = "chosen"
    rejected_field: str = "rejected"

    def split(
        self, record: dict, location: str, tokenizer: PreTrainedTokenizerBase, counts: ContentCounts
    ) -> tuple[Pieces, Pieces]:
        """Return the pieces of both samples. Raises `UserError` naming `location` when a field is missing or empty, or
        the two answers are the same.
        """
        get_eos(tokenizer)  # raises without one
        refuse_media(record, location)
        prompt, *answers = self._read_fields(record, location)
        for name, answer in zip((self.chosen_field, self.rejected_field), answers):
            check_answer(answer, name, location)
        if answers[0] == answers[1]:
            raise UserError(
                f"{location}: fields '{self.chosen_field}' and '{self.rejected_field}' are the same, "
                "so nothing is preferred; fix or remove the record"
            )
        if not isinstance(prompt, list):
            check_text(prompt, f"{location}: field '{self.prompt_field}'")
        if all(isinstance(value, str) for value in (prompt, *answers)):
            refuse_texts(self.chat_template, location, MESSAGES)
        chosen, rejected = split_answers(self, prompt, answers, record, location, tokenizer, counts)
        return chosen, rejected

    def _read_fields(self, record: dict, location: str) -> list:
        """Return [prompt, chosen, rejected], the answers without the turns of the prompt."""
        named = {
            "data.prompt_field": self.prompt_field,
            "data.chosen_field": self.chosen_field,
            "data.rejected_field": self.rejected_field,
        }
        whole: list[Any] = [record.get(name) for name in (self.chosen_field, self.rejected_field)]
        if not all(_is_conversation(answer) for answer in whole):
            return get_fields(record, named, location)
        shared = [turn for turn, _ in takewhile(lambda turns: turns[0] == turns[1], zip(*whole))]
        return [shared, *(answer[len(shared) :] for answer in whole)] if whole[0] != whole[1] else [[], *whole]


def check_answer(answer: object, field: str, location: str) -> None:
    """Raise `UserError` for an answer that is empty, or neither text nor a list."""
    if (not isinstance(answer, list) and not check_text(answer, f"{location}: field '{field}'").strip()) or not answer:
        raise UserError(f"{location}: field '{field}' is empty; fill it or remove the record")


def split_answers(
    keys: AnswerKeys,
    prompt: str | list,
    answers: Sequence[str | list],
    record: dict,
    location: str,
    tokenizer: PreTrainedTokenizerBase,
    counts: ContentCounts,
) -> list[Pieces]:
    """Return the pieces of the prompt with each answer: by the prompt template if all are texts, else by the chat
    template; then assistant turns in the prompt are not targets. record: holds the tools."""
    texts = [answer for answer in answers if isinstance(answer, str)]
    if isinstance(prompt, str) and len(texts) == len(answers):
        guard = Guard(tokenizer, keys.control_tokens, counts)
        question = guard.protect_text(prompt, f"{location}: the prompt")
        guarded = [guard.protect_text(text, f"{location}: an answer") for text in texts]
        counts.note_prompt(prompt, location)
        counts.num_target_turns += len(texts)
        counts.num_text_turns += len(texts)
        return [guard.release(split_completion(keys.prompt_template, question, text, tokenizer)) for text in guarded]
    turns = as_messages(prompt, "user")
    conversations = [[*turns, *as_messages(answer, ASSISTANT)] for answer in answers]
    samples, found = [], [ContentCounts() for _ in answers]
    for messages, own in zip(conversations, found):
        (pieces,) = split_messages(messages, record, location, tokenizer, keys, own, len(turns))
        samples.append(pieces)
    for own in (
        found[0],
        *(replace(each, num_prompt_turns=0, num_empty_prompts=0, empty_places=[]) for each in found[1:]),
    ):  # the prompt is one
        counts.add(own)
    return samples


def _is_conversation(answer: object) -> bool:
    """Returns whether an answer is a list that begins with a turn of another role than the assistant."""
    return (
        isinstance(answer, list) and bool(answer) and isinstance(answer[0], dict) and answer[0].get("role") != ASSISTANT
    )


class JudgedAnswer(Sample):
    """The sample of an answer that was liked or not."""

    desirable: bool


@dataclass(frozen=True)
class UnpairedEncoder(AnswerKeys, CountingEncoder):
    """Records with a prompt, a completion and a label. A field `tools` goes to the chat template."""

    prompt_field: str = "prompt"
    completion_field: str = "completion"
    label_field: str = "label"

    def encode(
        self,
        record: dict,
        location: str,
        tokenizer: PreTrainedTokenizerBase,
        counts: ContentCounts | None = None,
    ) -> JudgedAnswer:
        """Return the sample of one record. counts: what was found is added to it. Raises `UserError` naming `location`
        when a field is missing or empty, or the label is not true or false.
        """
        get_eos(tokenizer)  # raises without one
        refuse_media(record, location)
        names = {
            "data.prompt_field": self.prompt_field,
            "data.completion_field": self.completion_field,
            "data.label_field": self.label_field,
        }
        prompt, completion, given = get_fields(record, names, location)
        label = LABELS.get(given.lower()) if isinstance(given, str) else given
        if not isinstance(label, bool):
            raise UserError(
                f"{location}: field '{self.label_field}' must be true or false, not {given!r}; fix or remove the record"
            )
        check_answer(completion, self.completion_field, location)
        if not isinstance(prompt, list):
            check_text(prompt, f"{location}: field '{self.prompt_field}'")
        if isinstance(prompt, str) and isinstance(completion, str):
            refuse_texts(self.chat_template, location, MESSAGES)
        assert isinstance(prompt, str | list) and isinstance(completion, str | list)
        found = counts or ContentCounts()
        (pieces,) = split_answers(self, prompt, [completion], record, location, tokenizer, found)
        return {**tokenize_sample(pieces, location, tokenizer), "desirable": label}


_SCORED = "preferences are scored before the first step"
KINDS = (
    DataKind(
        "preference",
        PreferenceEncoder,
        task="dpo",
        together=("chosen", "rejected"),
        not_split="an answer that is split cannot be preferred",
        not_streamed=_SCORED,
        format_version=2,
    ),
    DataKind(
        "unpaired_preference",
        UnpairedEncoder,
        task="kto",
        label_key="desirable",
        label_names=("not liked", "liked"),
        not_split="an answer that is split cannot be judged",
        not_streamed=_SCORED,
        format_version=2,
    ),
)
