"""Conversations as text, by the tokenizer's chat template."""

import json
import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from jinja2 import Environment, TemplateError, meta
from transformers import PreTrainedTokenizerBase

from data.encoders.messages import ASSISTANT, Turn, split_thought
from errors import UserError

SWITCHES = ("enable_thinking", "thinking")  # variables of templates that turn reasoning on and off
GENERATION_TAG = re.compile(r"\{%(-?)\s*(end)?generation\s*(-?)%\}")
MARKS = ("\U0010fff0", "\U0010fff1")  # private characters: where a generation tag opens and closes

# Arguments of `apply_chat_template` that say how it is called, or that come from other fields of a record.
OWN_KWARGS = {"conversation", "messages", "tools", "chat_template", "tokenize", "add_generation_prompt"}
OWN_KWARGS |= {"continue_final_message", "return_dict", "return_tensors", "return_assistant_tokens_mask"}


@dataclass(frozen=True)
class Renderer:
    """Renders the conversations of one record. kwargs: what the template is called with in addition."""

    tokenizer: PreTrainedTokenizerBase
    location: str
    tools: list | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def template(self) -> str:
        return self.tokenizer.get_chat_template(tools=self.tools)

    def for_turn(self, turn: Turn) -> "Renderer":
        """Return the renderer of the context of an assistant turn: a template that can turn reasoning on and off does
        so by whether the turn holds some, where `kwargs` do not decide."""
        thinks = bool(split_thought(turn)[0])
        switches = dict.fromkeys(find_switches(self.template), thinks)
        return Renderer(self.tokenizer, self.location, self.tools, {**switches, **self.kwargs})

    def render_prompt(self, turns: Sequence[Turn]) -> str:
        """Return what the model sees when it generates the turn after these."""
        return self._render(turns, add_generation_prompt=True)

    def render(self, turns: Sequence[Turn]) -> str:
        """Return the conversation without a generation prompt."""
        return self._render(turns, add_generation_prompt=False)

    def render_marked(self, turns: Sequence[Turn]) -> str:
        """Return the same with `MARKS` where the template's generation tags are."""
        return self._render(turns, add_generation_prompt=False, chat_template=mark_generation(self.template))

    def try_render(self, turns: Sequence[Turn]) -> str | None:
        """Return the same as `render`; None where the template refuses the turns."""
        try:
            return self.render(turns)
        except UserError:
            return None

    def _render(self, turns: Sequence[Turn], **options: Any) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                list(turns), tools=self.tools, tokenize=False, **options, **self.kwargs
            )
        except Exception as error:  # a template's expressions raise whatever Python does
            reason = " ".join(str(error).split()) or type(error).__name__
            raise UserError(
                f"{self.location}: the chat template refuses the messages{_find_line(error)}: {reason}; fix or remove "
                "the record, or give another data.chat_template"
            ) from None

    def fit_calls(self, turns: Sequence[Turn]) -> list[Turn]:
        """Return the turns with their tool calls in a form that the template shows: arguments as objects or as JSON
        text, next to an absent or an empty content. Raises `UserError` where no form shows every call."""
        if not any(turn.get("tool_calls") for turn in turns):
            return list(turns)
        hidden = None
        for form in _list_forms(turns):
            text = self.try_render(form)
            if text is None or _shows_python(form, text):
                continue
            hidden = self._find_hidden_call(form, text)
            if hidden is None:
                return form
        if hidden is None:
            self.render(turns)  # raises with the template's own words
        message, call = hidden or (1, 1)
        raise UserError(
            f"{self.location}: message {message}: the chat template does not show tool call {call} of the turn; use a "
            "template that does (data.chat_template), or remove the record"
        )

    def _find_hidden_call(self, turns: Sequence[Turn], text: str) -> tuple[int, int] | None:
        """Return the numbers of the first message and call without which the text is the same."""
        for number, turn in enumerate(turns):
            for place in range(len(turn.get("tool_calls") or ())):
                calls = [call for index, call in enumerate(turn["tool_calls"]) if index != place]
                without = {name: value for name, value in turn.items() if name != "tool_calls" or calls}
                changed = without | ({"tool_calls": calls} if calls else {})
                if self.try_render([*turns[:number], changed, *turns[number + 1 :]]) == text:
                    return number + 1, place + 1
        return None


def read_template_kwargs(value: object, where: str) -> dict[str, Any]:
    """Return what a chat template is called with in addition; None is nothing. Raises `UserError` naming `where` for
    what is not a mapping, and for names that are given otherwise."""
    kwargs = {} if value is None else value
    if not isinstance(kwargs, dict):
        raise UserError(f"{where}={kwargs}: give a mapping, such as {{enable_thinking: false}}")
    if own := sorted(OWN_KWARGS & kwargs.keys()):
        raise UserError(f"{where}: {', '.join(own)} of a template cannot be set; omit it")
    return kwargs


def _list_forms(turns: Sequence[Turn]) -> Iterator[list[Turn]]:
    """Yield the forms in which templates read tool calls, the most common first."""
    for empty in (False, True):
        for as_text in (False, True):
            yield [_form_turn(turn, as_text=as_text, empty=empty) for turn in turns]


def _form_turn(turn: Turn, *, as_text: bool, empty: bool) -> Turn:
    if turn["role"] != ASSISTANT or not turn.get("tool_calls"):
        return turn
    calls = [_form_call(call) if as_text else call for call in turn["tool_calls"]]
    content = {"content": ""} if empty and "content" not in turn else {}
    return {**turn, "tool_calls": calls, **content}


def _form_call(call: Any) -> Any:
    arguments = call["function"].get("arguments") if isinstance(call, dict) and "function" in call else None
    if not isinstance(arguments, dict):
        return call
    return {**call, "function": {**call["function"], "arguments": json.dumps(arguments, ensure_ascii=False)}}


def _shows_python(turns: Sequence[Turn], text: str) -> bool:
    """Return whether arguments appear as Python writes them: the template has joined an object with text."""
    for turn in turns:
        for call in turn.get("tool_calls") or ():
            arguments = call["function"].get("arguments") if isinstance(call, dict) and "function" in call else None
            if isinstance(arguments, dict) and arguments and str(arguments) in text:
                return True
    return False


@lru_cache(maxsize=8)
def find_switches(template: str) -> tuple[str, ...]:
    """Return the variables of a template that turn reasoning on and off."""
    try:
        parsed = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(GENERATION_TAG.sub("", template))
    except TemplateError:  # rendering reports it
        return ()
    variables = meta.find_undeclared_variables(parsed)
    return tuple(name for name in SWITCHES if name in variables)


@lru_cache(maxsize=8)
def mark_generation(template: str) -> str:
    """Return the template with `MARKS` in place of its generation tags, and their control of white space."""

    def replace(tag: re.Match) -> str:
        mark = MARKS[1 if tag[2] else 0]
        return f"{{%{tag[1]} if true %}}{{{{ '{mark}' }}}}{{% endif {tag[3]}%}}"

    return GENERATION_TAG.sub(replace, template)


def has_generation_tags(template: str) -> bool:
    return GENERATION_TAG.search(template) is not None


def _find_line(error: Exception) -> str:
    """Return the line of the template that failed, in words; empty where Jinja does not report it."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<template>"]
    return f" (its line {lines[-1]})" if lines else ""
