"""Conversations: `chat template up to an assistant turn | the turn up to its stop token | ... | the last one`.

Loss is on assistant turns alone (all, the last, or those that say so), each with its stop token and in the context in
which the template would show it at inference. So where a template shows an earlier turn otherwise than it was
generated, a conversation becomes several samples (`data.rewritten_turns`).
"""

import datetime
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count
from typing import Any, ClassVar

from transformers import PreTrainedTokenizerBase

from data.counts import ContentCounts
from data.encoders.control_tokens import Guard
from data.encoders.messages import (
    ALPACA_FIELDS,
    ASSISTANT,
    SHAREGPT_FIELD,
    TURN_FLAGS,
    Turn,
    as_messages,
    check_messages,
    list_targets,
    normalize_message,
    read_alpaca,
    read_sharegpt,
    read_tools,
    refuse_media,
)
from data.encoders.rendering import DOCUMENTS, RECORD_KWARGS, Calendar, Renderer, read_template_kwargs
from data.encoders.segments import Piece, PieceEncoder, Pieces, check_text, get_eos, tokenize_pieces
from data.encoders.stops import Stops, build_stops
from data.encoders.turns import Answer, read_answer, read_kept
from data.options import ControlTokens, RewrittenTurns, TrainOn
from errors import UserError


@dataclass(frozen=True, kw_only=True)
class MessageKeys:
    """The keys of `data` that say how messages become text and targets.

    template_kwargs: what the chat template is called with in addition. control_tokens: in the content; None is `text`
    for turns that the model reads, and `parse` for everything else. stop_tokens: those of the model's
    generation_config.json.
    """

    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    train_on_reasoning: bool = True
    control_tokens: ControlTokens | None = None
    stop_tokens: tuple[str, ...] = ()
    # Constant where an answer has to stay one sample:
    train_on: ClassVar[TrainOn] = TrainOn.all_turns
    rewritten_turns: ClassVar[RewrittenTurns] = RewrittenTurns.last


@dataclass(frozen=True, kw_only=True)
class TurnKeys(MessageKeys):
    """The same for kinds of data whose records become any number of samples."""

    train_on: TrainOn = TrainOn.all_turns  # type: ignore[misc]
    rewritten_turns: RewrittenTurns = RewrittenTurns.split  # type: ignore[misc]


@dataclass(frozen=True)
class ChatEncoder(TurnKeys, PieceEncoder):
    """Records with `messages_field`, in the layout of ShareGPT or Alpaca, or with a prompt and a completion: a question
    and its answer, or lists of messages. `tools` goes to the chat template."""

    messages_field: str = "messages"
    prompt_field: str = "prompt"
    completion_field: str = "completion"

    def split(
        self, record: dict, location: str, tokenizer: PreTrainedTokenizerBase, counts: ContentCounts
    ) -> list[Pieces]:
        """Return the pieces of each sample. Raises `UserError` naming `location` for missing or unordered turns."""
        get_eos(tokenizer)  # raises without one
        refuse_media(record, location)
        messages, first_target = self._read_messages(record, location)
        return split_messages(messages, record, location, tokenizer, self, counts, first_target)

    def _read_messages(self, record: dict, location: str) -> tuple[object, int]:
        """Return the messages of a record, and the first that may be a target."""
        if self.messages_field in record:
            return record[self.messages_field], 0
        if SHAREGPT_FIELD in record:
            return read_sharegpt(record, location), 0
        if all(name in record for name in ALPACA_FIELDS):
            return read_alpaca(record, location), 0
        pair = (self.prompt_field, self.completion_field)
        if all(name in record for name in pair):
            return join_pair(*(record[name] for name in pair), names=pair, location=location)
        present = ", ".join(f"'{name}'" for name in record) or "no fields"
        raise UserError(
            f"{location}: no field '{self.messages_field}', nor those of ShareGPT ('{SHAREGPT_FIELD}'), Alpaca "
            f"('instruction', 'output') or a prompt ('{self.prompt_field}', '{self.completion_field}'); the record has "
            f"{present}; set data.messages_field, or data.prompt_field and data.completion_field"
        )


def join_pair(prompt: Any, completion: Any, *, names: Sequence[str], location: str) -> tuple[list, int]:
    """Return a prompt and a completion, texts or lists of messages, as one conversation, and the place of the
    completion in it. Raises `UserError` for one that is neither."""
    for value, name in zip((prompt, completion), names):
        if not isinstance(value, list):
            check_text(value, f"{location}: field '{name}'")
    question = as_messages(prompt, "user")
    return [*question, *as_messages(completion, ASSISTANT)], len(question)


def split_messages(
    messages: object,
    record: dict,
    location: str,
    tokenizer: PreTrainedTokenizerBase,
    keys: MessageKeys,
    counts: ContentCounts,
    first_target: int = 0,
) -> list[Pieces]:
    """Return the pieces of each sample that a conversation becomes, up to its last target. record: holds the tools
    that the template shows the model. first_target: assistant turns before this message are not targets. Raises
    `UserError` naming `location` for messages that cannot be read or hold no target.
    """
    if tokenizer.chat_template is None:
        raise UserError(
            f"{location}: the record holds messages, but the tokenizer has no chat template; name one with"
            " data.chat_template (such as chatml), or use records with a prompt and a completion"
        )
    checked = check_messages(messages, location)
    targets = list_targets(checked, location, keys.train_on, first_target)
    for number, turn in enumerate(checked[: targets[-1]], start=1):
        if turn["role"] == "user":
            counts.note_prompt(turn.get("content") or "", f"{location}: message {number}")
    guard = Guard(tokenizer, keys.control_tokens, counts)
    renderer = open_renderer(record, location, guard, keys.template_kwargs)
    turns = [
        guard.protect_turn({name: value for name, value in turn.items() if name not in TURN_FLAGS}, where)
        for turn, where in zip(checked[: targets[-1] + 1], (f"{location}: message {number}" for number in count(1)))
    ]
    turns = renderer.fit_calls(turns)
    stops = get_stops(tokenizer, keys.stop_tokens)
    answers = [read_answer(renderer, turns, index, stops, keys.train_on_reasoning) for index in targets]
    if keys.rewritten_turns is RewrittenTurns.keep:
        answers = read_kept(renderer, turns, list(zip(targets, answers)), stops, keys.train_on_reasoning)
    samples = _join_answers(answers, tokenizer)
    kept = samples[-1:] if keys.rewritten_turns is RewrittenTurns.last else samples
    counts.add(_count_turns(checked, targets, first_target))
    counts.num_lost_turns += sum(num for _, num in samples) - sum(num for _, num in kept)
    counts.add(_count_answers(answers))
    counts.num_default_dates += renderer.calendar.was_needed
    return [guard.release(pieces) for pieces, _ in kept]


def open_renderer(record: dict, location: str, guard: Guard, template_kwargs: Mapping[str, Any]) -> Renderer:
    """Return the renderer of a record's messages, with the tools and the keywords of the record, guarded.
    template_kwargs: what the template is called with where the record does not say otherwise."""
    where = f"{location}: {RECORD_KWARGS}"
    own_kwargs = guard.protect_input(read_template_kwargs(record.get(RECORD_KWARGS), where), where)
    tools = guard.protect_input(read_tools(record.get("tools"), location), f"{location}: tools")
    kwargs = {**template_kwargs, **own_kwargs}
    return Renderer(guard.tokenizer, location, tools, kwargs, Calendar.of(kwargs))


def encode_prompt(
    messages: Sequence[dict],
    location: str,
    tokenizer: PreTrainedTokenizerBase,
    tools: list | None = None,
    kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """Return the ids of a conversation with the generation prompt, for a tokenizer with a chat template. Control tokens
    in the text of users, tools, documents and the system are letters, as in training.

    tools: as `read_tools` returns them. kwargs: what the template is called with in addition, as `read_template_kwargs`
    returns it; without a date the template writes that of the day. Raises `UserError` naming `location` where the
    template refuses the messages.
    """
    guard = Guard(tokenizer, None, ContentCounts())
    kwargs = dict(kwargs or {})
    if DOCUMENTS in kwargs:
        kwargs[DOCUMENTS] = guard.protect_input(kwargs[DOCUMENTS], f"{location}: {DOCUMENTS}")
    tools = guard.protect_input(tools, f"{location}: tools")
    turns = [
        guard.protect_turn(normalize_message(message), f"{location}: message {number}")
        for number, message in zip(count(1), messages)
    ]
    renderer = Renderer(tokenizer, location, tools, kwargs, Calendar.of(kwargs, datetime.date.today()))
    pieces = guard.release([Piece(renderer.render_prompt(renderer.fit_calls(turns)), False)])
    (sample,) = tokenize_pieces([pieces], tokenizer, {})
    return sample["input_ids"]


@lru_cache(maxsize=2)
def get_stops(tokenizer: PreTrainedTokenizerBase, stop_tokens: tuple[str, ...]) -> Stops:
    return build_stops(tokenizer, stop_tokens)


def _join_answers(answers: Sequence[Answer], tokenizer: PreTrainedTokenizerBase) -> list[tuple[Pieces, int]]:
    """Return the pieces of each sample with the number of its target turns. A turn continues the sample before it
    where its context shows the targets of that sample as they were generated."""
    samples: list[tuple[Pieces, int]] = []
    pieces: Pieces = []
    done, stop, num_turns = "", "", 0
    for answer in answers:
        if pieces and not answer.prompt.startswith(done):
            samples.append((_end(pieces, stop, tokenizer), num_turns))
            pieces, done, stop, num_turns = [], "", "", 0
        pieces += _join(answer.prompt[len(done) :], stop, tokenizer)
        pieces += [Piece(text, is_target, is_answer=True) for text, is_target in answer.parts]
        done, stop, num_turns = answer.prompt + answer.text, answer.stop, num_turns + 1
    return [*samples, (_end(pieces, stop, tokenizer), num_turns)]


def _join(text: str, stop: str, tokenizer: PreTrainedTokenizerBase) -> Pieces:
    """Return the text between two turns, the first of which ends with `stop`, whether the template writes it or not."""
    if not stop:
        return [Piece(text, False)]
    token_id = tokenizer.convert_tokens_to_ids(stop)
    if text.startswith(stop):
        return [Piece([token_id], True), Piece(text[len(stop) :], False)]
    return [Piece(text, False, first_label=token_id)]


def _end(pieces: Pieces, stop: str, tokenizer: PreTrainedTokenizerBase) -> Pieces:
    return [*pieces, Piece([tokenizer.convert_tokens_to_ids(stop)], True)] if stop else pieces


def _count_turns(turns: Sequence[Turn], targets: Sequence[int], first_target: int) -> ContentCounts:
    """Return the counts of the assistant turns of a conversation, by why they are targets or not."""
    counts = ContentCounts(num_target_turns=len(targets))
    for index, turn in enumerate(turns):
        if turn["role"] != ASSISTANT or index in targets:
            continue
        if index < first_target:
            counts.num_prompt_turns += 1
        elif any(turn.get(name) is not None for name in TURN_FLAGS):
            counts.num_marked_turns += 1
        else:
            counts.num_earlier_turns += 1
    return counts


def _count_answers(answers: Sequence[Answer]) -> ContentCounts:
    return ContentCounts(
        num_hidden_thoughts=sum(answer.hides_thought for answer in answers),
        num_other_masks=sum(answer.is_tagged_otherwise for answer in answers),
        stop_tokens=dict(Counter(answer.stop for answer in answers if answer.stop)),
    )
