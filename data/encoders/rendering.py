"""Conversations as text, by the tokenizer's chat template.

Many templates write the date of the day (`strftime_now`). Samples must not depend on the day on which they are made, so
a template gets `date` of its keywords, or else `DEFAULT_DATE`.
"""

import datetime
import json
import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

from jinja2 import TemplateError, meta, nodes
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import _compile_jinja_template

from data.encoders.messages import ASSISTANT, Turn, split_thought
from data.options import DEFAULT_DATE
from errors import UserError

SWITCHES = ("enable_thinking", "thinking")  # variables of templates that turn reasoning on and off
GENERATION_TAG = re.compile(r"\{%(-?)\s*(end)?generation\s*(-?)%\}")
MARKS = ("\U0010fff0", "\U0010fff1")  # private characters: where a generation tag opens and closes
THOUGHT_MARK = "\U0010fff2"  # the same: where the reasoning of a turn ends

RECORD_KWARGS = "chat_template_kwargs"  # the keywords of a record, as TRL has them
DOCUMENTS, DATE = "documents", "date"  # keywords
NOW, DATE_STRING = "strftime_now", "date_string"  # what templates read
DATE_STRING_FORMAT = "%d %b %Y"  # of Llama 3, in templates that have no strftime_now

# Arguments of `apply_chat_template` that say how it is called, or that come from other fields of a record.
OWN_KWARGS = {"conversation", "messages", "tools", "chat_template", "tokenize", "add_generation_prompt"}
OWN_KWARGS |= {"continue_final_message", "return_dict", "return_tensors", "return_assistant_tokens_mask", NOW}


@dataclass
class Calendar:
    """The date that a template writes. given: of the keywords. default: where they give none. was_needed: the template
    has asked for a date, and none was given."""

    given: datetime.date | None = None
    default: datetime.date = DEFAULT_DATE
    was_needed: bool = False

    @classmethod
    def of(cls, kwargs: Mapping[str, Any], default: datetime.date = DEFAULT_DATE) -> "Calendar":
        """Return the calendar of keywords that `read_template_kwargs` has checked."""
        return cls(datetime.date.fromisoformat(kwargs[DATE]) if DATE in kwargs else None, default)

    def get_variables(self, read: frozenset[str]) -> dict[str, Any]:
        """Return what the template reads of the date. read: the names of all its variables."""
        variables: dict[str, Any] = {NOW: self._format} if NOW in read else {}
        if self.given and DATE_STRING in read and NOW not in read:
            variables[DATE_STRING] = self.given.strftime(DATE_STRING_FORMAT)
        return variables

    def _format(self, form: str) -> str:
        self.was_needed |= self.given is None
        return (self.given or self.default).strftime(form)


@dataclass(frozen=True)
class Renderer:
    """Renders the conversations of one record, as `apply_chat_template` does but for the date, which is that of the
    calendar. tools: as `read_tools` returns them. kwargs: what the template is called with in addition, as
    `read_template_kwargs` returns it."""

    tokenizer: PreTrainedTokenizerBase
    location: str
    tools: list | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    calendar: Calendar = field(default_factory=Calendar)
    _variants: "dict[bool, Renderer]" = field(default_factory=dict, init=False, repr=False)  # see `for_turn`

    @cached_property
    def template(self) -> str:
        return self.tokenizer.get_chat_template(tools=self.tools)

    @cached_property
    def _variables(self) -> dict[str, Any]:
        """The variables of the template, without messages and the generation prompt."""
        return {
            DOCUMENTS: None,
            **self.tokenizer.special_tokens_map,
            **self.calendar.get_variables(find_variables(self.template)),
            **self.kwargs,
            "tools": self.tools,
        }

    def for_turn(self, turn: Turn) -> "Renderer":
        """Return the renderer of the context of an assistant turn: a template that can turn reasoning on and off does
        so by whether the turn holds some, where `kwargs` do not decide."""
        switches = [name for name in find_switches(self.template) if name not in self.kwargs]
        if not switches:
            return self
        thinks = bool(split_thought(turn)[0])
        if thinks not in self._variants:
            self._variants[thinks] = replace(self, kwargs={**dict.fromkeys(switches, thinks), **self.kwargs})
        return self._variants[thinks]

    def render_prompt(self, turns: Sequence[Turn]) -> str:
        """Return what the model sees when it generates the turn after these."""
        return self._render(turns, self.template, add_generation_prompt=True)

    def render(self, turns: Sequence[Turn]) -> str:
        """Return the conversation without a generation prompt."""
        return self._render(turns, self.template)

    def render_marked(self, turns: Sequence[Turn]) -> str:
        """Return the same with `MARKS` where the template's generation tags are."""
        return self._render(turns, mark_generation(self.template))

    def try_render(self, turns: Sequence[Turn]) -> str | None:
        """Return the same as `render`; None where the template refuses the turns."""
        try:
            return self.render(turns)
        except UserError:
            return None

    def _render(self, turns: Sequence[Turn], text: str, add_generation_prompt: bool = False) -> str:
        try:
            template = _compile_jinja_template(text)
            return template.render(
                {**self._variables, "messages": turns, "add_generation_prompt": add_generation_prompt}
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
    what is not a mapping, for names that are given otherwise, and for a date or documents that cannot be read."""
    kwargs = {} if value is None else value
    if not isinstance(kwargs, dict):
        raise UserError(f"{where}={kwargs}: give a mapping, such as {{enable_thinking: false}}")
    if own := sorted(OWN_KWARGS & kwargs.keys()):
        raise UserError(f"{where}: {', '.join(own)} of a template cannot be set; omit it")
    documents = kwargs.get(DOCUMENTS) or []
    if not isinstance(documents, list) or not all(isinstance(document, dict) for document in documents):
        raise UserError(
            f"{where}: documents must be a list of objects, such as [{{title: Spiders, text: Eight legs.}}]"
        )
    if kwargs.get(DATE) is None:
        return {name: each for name, each in kwargs.items() if name != DATE}
    return kwargs | {DATE: _check_date(kwargs[DATE], where)}


def _check_date(value: object, where: str) -> str:
    """Return a date as text; YAML makes an object of it."""
    text = str(value)
    try:
        if not re.fullmatch(r"\d{4}-\d{2}-\d{2}", text):
            raise ValueError
        datetime.date.fromisoformat(text)
    except ValueError:
        raise UserError(f"{where}: date={value} is not a day; give one as in 2026-01-31") from None
    return text


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
    return tuple(name for name in SWITCHES if name in find_variables(template))


@lru_cache(maxsize=8)
def find_variables(template: str) -> frozenset[str]:
    """Return the names that a template looks up in what it is called with; none for one that is not valid Jinja."""
    try:
        parsed = _compile_jinja_template(template).environment.parse(template)
    except TemplateError:  # rendering reports it
        return frozenset()
    has_now = any(name.name == NOW for name in parsed.find_all(nodes.Name))  # a global, which jinja2 leaves out
    return frozenset(meta.find_undeclared_variables(parsed) | ({NOW} if has_now else set()))


@lru_cache(maxsize=8)
def mark_generation(template: str) -> str:
    """Return the template with `MARKS` in place of its generation tags, and their control of white space."""

    def replace(tag: re.Match) -> str:
        mark = MARKS[1 if tag[2] else 0]
        return f"{{%{tag[1]} if true %}}{{{{ '{mark}' }}}}{{% endif {tag[3]}%}}"

    return GENERATION_TAG.sub(replace, template)


@lru_cache(maxsize=8)
def has_generation_tags(template: str) -> bool:
    return GENERATION_TAG.search(template) is not None


def _find_line(error: Exception) -> str:
    """Return the line of the template that failed, in words; empty where Jinja does not report it."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<template>"]
    return f" (its line {lines[-1]})" if lines else ""
