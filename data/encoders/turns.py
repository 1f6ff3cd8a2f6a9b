"""Splits the text of a conversation at an assistant turn: what the model reads before it, what it has to generate, and
the token at which it stops.

The rule (docs/data.md): a target is what the model itself has to generate at inference. The prompt of a turn is the
conversation before it with the generation prompt of the chat template. That may include the beginning of the answer,
such as an opened thought (`<think>`) or an empty one. The text of the turn is what the template shows after this
prompt, up to the token at which generation stops. If the template marks what is generated with `{% generation %}` tags,
the tags decide instead.

A thought, or reasoning, is the text that a model writes before its answer, in a field of its own or in `<think>` tags.
A place in a text is a number of characters from its beginning.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from data.encoders.messages import ASSISTANT, REASONING_FIELDS, THOUGHT_END, THOUGHT_START, Turn, split_thought
from data.encoders.rendering import MARKS, THOUGHT_MARK, Renderer, has_generation_tags
from data.encoders.stops import Stops, build_stops, read_stop_tokens
from errors import UserError

PROBE = "next turn"  # the text of a made-up turn, which is rendered to see what the template writes before a turn

# A made-up conversation, to see at which tokens a template ends an answer and a tool call
_ASKED = {"role": "user", "content": "a question"}
_CALL = {"id": "call00000", "type": "function", "function": {"name": "look", "arguments": {"word": "a word"}}}
_WORD = {"type": "object", "properties": {"word": {"type": "string", "description": "what"}}, "required": ["word"]}
_TOOL = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": _WORD}}
_ANSWERS: tuple[Turn, ...] = (
    {"role": ASSISTANT, "content": "an answer"},
    {"role": ASSISTANT, "content": "", "tool_calls": [_CALL]},
)

Part = tuple[str, bool]  # a piece of text, and whether it is a target


@dataclass(frozen=True)
class Answer:
    """An assistant turn as the model generates it."""

    prompt: str  # all text before the turn, from the beginning of the conversation
    parts: tuple[Part, ...]  # the text of the turn, end to end
    # The token that ends the turn, which is a target. Empty if tags decide: the token is in `parts` if they mark it.
    stop: str
    hides_thought: bool = False  # whether the turn has reasoning that the template does not show
    is_tagged_otherwise: bool = False  # whether the template has tags, but they do not mark the text of the rule

    @property
    def text(self) -> str:
        """The text of all parts. `stop` is not in it."""
        return "".join(text for text, _ in self.parts)


def read_answer(
    renderer: Renderer, turns: Sequence[Turn], index: int, stops: Stops, train_on_reasoning: bool
) -> Answer:
    """Return one assistant turn as the model generates it.

    renderer: the chat template with the tools and variables of the record. turns: the conversation, in the form that
    `Renderer.fit_calls` returns. index: the number of the assistant turn, from 0; later turns are not read. stops: the
    stop tokens of the model. train_on_reasoning: whether the turn's reasoning is a target; otherwise the turn is masked
    from its beginning to the end of the reasoning.

    Raises UserError, which begins with the place of the record, if the template refuses the turns or shows nothing of
    this one, if it changes earlier turns so that this one cannot be separated from its prompt, or if the end of the
    reasoning cannot be found.
    """
    answer = _read_answer(renderer, turns, index, stops)
    if train_on_reasoning or not split_thought(turns[index])[0]:
        return answer
    marked = _read_answer(renderer, [*turns[:index], _mark_thought(turns[index])], index, stops)
    ends = _find_marks(marked.text, answer.text, f"{renderer.location}: message {index + 1}")
    return _mask_start(answer, max(ends, default=0))


def _read_answer(renderer: Renderer, turns: Sequence[Turn], index: int, stops: Stops) -> Answer:
    """Return the result of `read_answer` with `train_on_reasoning`: the reasoning is a target too."""
    turn, where = turns[index], f"{renderer.location}: message {index + 1}"
    shown = renderer.for_turn(turn)
    prompt = shown.render_prompt(turns[:index])
    generated = _separate(shown, turns, index, prompt, where)
    body, stop = stops.split(generated, lambda: _find_following(shown, turns[: index + 1], generated))
    if not body.strip():
        raise UserError(
            f"{where}: the chat template writes nothing of this assistant turn, so there is nothing to train on; use a"
            " template that does (data.chat_template)"
        )
    thought, _ = split_thought(turn)
    hides = bool(thought) and _squeeze(thought) not in _squeeze(body)
    answer = Answer(prompt, ((body, True),), stop, hides_thought=hides)
    return _follow_tags(answer, shown, turns[: index + 1]) if has_generation_tags(shown.template) else answer


def _separate(shown: Renderer, turns: Sequence[Turn], index: int, prompt: str, where: str) -> str:
    """Return what the template shows of the turn `index` after its generation prompt.

    shown: the renderer for this turn. prompt: the turns before it with the generation prompt. where: the beginning of
    an error message. Raises UserError if the text does not continue the prompt, and its beginning cannot be found in
    another way.
    """
    after = shown.render(turns[: index + 1])
    if after.startswith(prompt):
        return after[len(prompt) :]
    start = _count_shared(shown.render(turns[:index]), prompt)
    header, opened, tail = prompt[start:].rpartition(THOUGHT_START)
    begin = start + len(header)
    if opened and THOUGHT_END not in tail and after.startswith(prompt[:begin]):
        return _close_thought(after[begin:], turns[index])
    if after.startswith(prompt.rstrip()):
        return after[len(prompt.rstrip()) :].lstrip()
    # Some templates show an earlier turn in another way once it is not the last one: Mistral's move the system prompt.
    place, length = _align(after, prompt)
    question = str(turns[index - 1].get("content") or "").strip()
    if question and question in prompt[len(prompt) - length :]:
        return after[place:]
    raise UserError(
        f"{where}: the chat template rewrites earlier turns, so the text of the assistant turn cannot be separated from"
        " its prompt; use another template, or one record per turn"
    )


def _align(text: str, other: str) -> tuple[int, int]:
    """Find the longest end of `other` that occurs in `text`. Return the place in `text` at which its last occurrence
    stops, and its length in characters; (len(text), 0) if not even the last character of `other` occurs."""
    best, bound, length = len(text), len(text), 0
    while length < len(other):
        ending = other[-length - 1 :]  # one character more than the longest that was found
        start = text.rfind(ending, 0, bound)
        if start < 0:
            break
        best, bound = start + len(ending), start + len(ending) - 1
        length = _count_matching(partial(_ends_with, text, best, other), len(other))
    return best, length


def _ends_with(text: str, end: int, other: str, count: int) -> bool:
    """Return whether `text[:end]` ends with the last `count` characters of `other`. count: 1 or more."""
    return text.endswith(other[-count:], 0, end)


def _count_matching(matches: Callable[[int], bool], most: int) -> int:
    """Return the largest count from 0 to `most` for which `matches` is true, by bisection: `matches` must be true for
    every count below that one. It is not called with 0."""
    low = 0
    while low < most:
        middle = (low + most + 1) // 2
        low, most = (middle, most) if matches(middle) else (low, middle - 1)
    return low


def _close_thought(shown: str, turn: Turn) -> str:
    """Return the text of a turn after a generation prompt that ends in an opened thought, for a template whose
    rendering of the turn does not begin in the same way.

    shown: the template's rendering of the turn, from the place at which the prompt opens the thought. A thought that
    the template does not show is added from the turn, with the tag that closes it.
    """
    if shown.startswith(THOUGHT_START):
        return shown.removeprefix(THOUGHT_START).lstrip()
    if THOUGHT_END in shown:
        return shown
    thought, _ = split_thought(turn)
    return f"{thought}\n{THOUGHT_END}\n\n{shown.lstrip()}"


def _find_following(shown: Renderer, turns: Sequence[Turn], generated: str) -> str:
    """Return what the template writes between the end of the last turn and the text of a turn that follows: a tool's
    result if the last turn calls a tool, else a user's turn. Empty if the template refuses such a turn, or does not
    show its text.

    shown: the renderer for the last turn. generated: what the template shows of the last turn after its prompt.
    """
    calls = turns[-1].get("tool_calls")
    if calls:
        probe = [{"role": "tool", "content": PROBE, **_name_result(call)} for call in calls[:1]]
    else:
        probe = [{"role": "user", "content": PROBE}]
    before, _, _ = (shown.try_render([*turns, *probe]) or "").rpartition(PROBE)
    start, _ = _align(before, generated.rstrip())
    return before[start:]


def _name_result(call: dict) -> dict:
    """Return the fields of a tool's result that refer to its call: name and id, if the call has them."""
    named = {"name": call.get("function", {}).get("name"), "tool_call_id": call.get("id")}
    return {name: value for name, value in named.items() if value is not None}


def _mark_thought(turn: Turn) -> Turn:
    """Return a turn with `THOUGHT_MARK` at the end of its reasoning; a turn without reasoning as it is."""
    thought, _ = split_thought(turn)
    if turn["role"] != ASSISTANT or not thought:
        return turn
    fields = [name for name in REASONING_FIELDS if str(turn.get(name) or "").strip()]
    if fields:
        return {**turn, **{name: _append_mark(turn[name]) for name in fields}}
    head, end, answer = turn["content"].partition(THOUGHT_END)
    return {**turn, "content": _append_mark(head) + end + answer}


def _append_mark(text: str) -> str:
    """Return a text with `THOUGHT_MARK` after its last character that is not white space, since a template may strip
    the white space at its end."""
    end = len(text.rstrip())
    return text[:end] + THOUGHT_MARK + text[end:]


def _find_marks(marked: str, text: str, where: str) -> list[int]:
    """Return the places in `text` at which reasoning ends, in order.

    text: a rendering. marked: the rendering of the same turns with a `THOUGHT_MARK` at the end of their reasoning.
    where: the beginning of an error message. Raises UserError if the two differ in more than the marks: then the
    template changes the reasoning, and its end cannot be found.
    """
    before, *rest = marked.split(THOUGHT_MARK)
    if before + "".join(rest) != text:
        raise UserError(
            f"{where}: where its reasoning ends cannot be found, since the chat template changes it; give "
            "data.train_on_reasoning=true or another data.chat_template"
        )
    return list(accumulate(map(len, rest[:-1]), initial=len(before))) if rest else []


def _mask_start(answer: Answer, end: int) -> Answer:
    """Return the answer with the first `end` characters of its text masked, which are then not targets."""
    parts, begin = [], 0
    for text, is_target in answer.parts:
        cut = min(max(end - begin, 0), len(text))
        parts += [(text[:cut], False), (text[cut:], is_target)]
        begin += len(text)
    return replace(answer, parts=tuple((text, is_target) for text, is_target in parts if text))


def _follow_tags(answer: Answer, shown: Renderer, turns: Sequence[Turn]) -> Answer:
    """Return the last turn with the targets that the template's generation tags mark. If they mark nothing of it, its
    targets stay those of the rule, and `is_tagged_otherwise` is set.

    answer: the turn by the rule. shown: the renderer for the turn. turns: the conversation up to the turn.
    """
    text, spans = read_marks(shown.render_marked(turns))
    start = _count_shared(text, shown.render(turns[:-1]))
    spans = [(max(begin, start), end) for begin, end in spans if end > start]
    if not spans:
        return replace(answer, is_tagged_otherwise=True)
    parts: list[Part] = []
    done = spans[0][0]
    for begin, end in spans:
        parts += [(text[done:begin], False), (text[begin:end], True)]
        done = end
    marked = "".join(part for part, is_target in parts if is_target)
    return replace(
        answer,
        prompt=text[: spans[0][0]],
        parts=tuple(part for part in parts if part[0]),
        stop="",
        is_tagged_otherwise=_squeeze(marked) != _squeeze(answer.text + answer.stop),
    )


def read_marks(marked: str) -> tuple[str, list[tuple[int, int]]]:
    """Return a text without its `MARKS`, and what each pair of marks encloses: (begin, end) as places in the text that
    is returned, `end` excluded. marked: as `Renderer.render_marked` returns it."""
    text, spans = "", []
    for number, piece in enumerate(marked.replace(MARKS[1], MARKS[0]).split(MARKS[0])):
        if number % 2:
            spans.append((len(text), len(text) + len(piece)))
        text += piece
    return text, spans


def _count_shared(one: str, other: str) -> int:
    """Return the number of characters at the beginning of two texts that are the same in both."""
    return _count_matching(lambda count: one.startswith(other[:count]), min(len(one), len(other)))


def _squeeze(text: str) -> str:
    """Return a text without white space, to compare texts that differ in white space."""
    return "".join(text.split())


def read_kept(
    renderer: Renderer,
    turns: Sequence[Turn],
    answers: Sequence[tuple[int, Answer]],
    stops: Stops,
    train_on_reasoning: bool,
) -> list[Answer]:
    """Return answers as the rendering of the whole conversation shows them, for one sample that has them all
    (`data.rewritten_turns=keep`). They may differ from `read_answer`, since a template may show an earlier turn in
    another way once other turns follow. Tags of the template are not followed here.

    renderer, stops, train_on_reasoning: as in `read_answer`. turns: the conversation up to the last answer. answers:
    the results of `read_answer`, each with the number of its turn, in order. Raises UserError if the template refuses
    the turns or the end of the reasoning cannot be found.
    """
    shown = renderer.for_turn(turns[-1])
    text = shown.render(turns)
    thought_ends: list[int] = []
    if not train_on_reasoning:
        thought_ends = _find_marks(shown.render([_mark_thought(turn) for turn in turns]), text, renderer.location)
    places: list[tuple[int, int]] = []
    for index, answer in answers:
        places.append(_find_turn(shown, turns, index, answer, text, places[-1][1] if places else 0))
    kept = []
    for (start, inside), bound, (_, answer) in zip(places, [*(start for start, _ in places[1:]), len(text)], answers):
        end, stop = stops.find(text, answer.stop, inside, bound)
        shown_answer = Answer(text[:start], ((text[start:end], True),), stop, answer.hides_thought)
        masked = max((place - start for place in thought_ends if start <= place <= end), default=0)
        kept.append(_mask_start(shown_answer, masked))
    return kept


def _find_turn(
    shown: Renderer, turns: Sequence[Turn], index: int, answer: Answer, text: str, done: int
) -> tuple[int, int]:
    """Return the place in `text` at which the turn `index` begins after its header, and the place at which its content
    or the name of its last call ends.

    shown: the renderer of `text`. turns: the conversation. answer: the turn as `read_answer` returns it. text: the
    rendering of all turns. done: the second place of the answer before this one; 0 for the first answer.
    """
    inside = shown.render([*turns[:index], _mark_turn(turns[index]), *turns[index + 1 :]]).find(MARKS[0])
    base = shown.render(turns[:index])
    header = answer.prompt[_count_shared(base, answer.prompt) :]
    for length in range(len(header), 0, -1):
        if (place := text.find(header[:length], done, inside)) >= 0:
            return place + length, inside
    return max(done, _count_shared(base, text)), inside


def _mark_turn(turn: Turn) -> Turn:
    """Return a turn with a mark after its content or, if it calls tools, after the name of the function in its last
    call."""
    if not turn.get("tool_calls"):
        return {**turn, "content": turn["content"].rstrip() + MARKS[0]}
    *calls, last = turn["tool_calls"]
    function = last["function"]
    return {**turn, "tool_calls": [*calls, {**last, "function": {**function, "name": function["name"] + MARKS[0]}}]}


def find_stop_tokens(folders: Iterable[str | Path], tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Return the tokens at which a model stops in addition to the tokenizer's eos token, sorted. They are the eos
    tokens of the first generation_config.json in `folders` that names some, and the tokens with which the chat template
    ends an answer and a tool call. folders: of the model and its tokenizer; they need not exist."""
    known = next((tokens for folder in folders if (tokens := read_stop_tokens(folder, tokenizer))), ())
    return tuple(sorted({*known, *find_template_stops(tokenizer, known)} - {str(tokenizer.eos_token)}))


def find_template_stops(tokenizer: PreTrainedTokenizerBase, stop_tokens: tuple[str, ...]) -> set[str]:
    """Return the tokens with which the chat template ends an answer and a tool call. A turn that the template refuses
    or does not show adds none, and the result is empty for a tokenizer without a chat template or without an eos token.
    stop_tokens: the eos tokens of generation_config.json."""
    found: set[str] = set()
    if tokenizer.chat_template is None or tokenizer.eos_token is None:
        return found
    for answer in _ANSWERS:
        with suppress(UserError):
            renderer = Renderer(tokenizer, "a probe", [_TOOL] if answer.get("tool_calls") else None)
            turns = renderer.fit_calls([_ASKED, answer])
            found.add(read_answer(renderer, turns, 1, build_stops(tokenizer, stop_tokens), True).stop)
    return found - {""}
